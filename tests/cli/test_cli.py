"""The commands, as a shell sees them: streams, exit codes, files. The model is tests/cli/fake_minfer.py."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import fake_minfer as fake
import numpy as np
import pytest

import minfer
from minfer.cli import EXIT_CODES, main
from minfer.cli.chat import HELP
from minfer.gguf import Tensor, write_model
from minfer.sources import cache

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAKE = [sys.executable, str(HERE / "fake_minfer.py")]


def interruptible() -> None:
    """As a shell at a terminal starts a program; the tests themselves may run where Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


HANG = 60  # seconds after which a test gives up; nothing is measured against it


@pytest.fixture
def environment(tmp_path):
    keep = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FAKE_ANSWER")}
    return {
        **keep,
        "PYTHONPATH": str(Path(minfer.__file__).parents[1]),
        "MINFER_CACHE": str(tmp_path / "cache"),
        "FAKE_CALLS": str(tmp_path / "calls"),
        "TERM": "xterm",
        "COLUMNS": "100",
    }


@pytest.fixture
def shell(environment, tmp_path, monkeypatch, capsys):
    """A command in this process; the tests of signals, pipes and terminals start a real one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(minfer, "load", fake.load, raising=False)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    def run(*words: str, input: bytes = b"", **more: str) -> subprocess.CompletedProcess[str]:
        fake.CALLS.clear()
        with monkeypatch.context() as scope:
            for name, value in {**environment, **more}.items():
                scope.setenv(name, value)
            scope.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
            with pytest.raises(SystemExit) as end:
                main(["model.gguf" if word == "MODEL" else word for word in words])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(words, end.value.code, out, err)

    return run


@pytest.fixture
def calls():
    return lambda: json.loads(json.dumps(fake.CALLS))


# ---- run ----


def test_run_keeps_text_and_notes_apart(shell, calls):
    done = shell("run", "-m", "MODEL", "Why is the sky blue?")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "You said: user: Why is the sky blue?\n",
        "device: fake\n",
    )
    assert calls()[1]["messages"] == [{"role": "user", "content": "Why is the sky blue?"}]
    assert calls()[-1]["call"] == "close"


def test_run_passes_every_flag_on(shell, calls):
    flags = "--temp 0.5 --top-k 7 --top-p 0.6 --min-p 0.1 --repeat-penalty 1.2 --seed 9 -n 5 --stop END --stop FIN"
    flags += " --n-ctx 99 --device fake -t 2 --kv-format f16"
    shell("run", "-m", "MODEL", "--raw", *flags.split(), "Once")
    loaded, generated = calls()[:2]
    assert loaded == {"call": "load", "n_ctx": 99, "device": "fake", "threads": 2, "kv_format": "f16"}
    sampling = minfer.Sampling(temperature=0.5, top_k=7, top_p=0.6, min_p=0.1, repeat_penalty=1.2, seed=9)
    assert generated == {
        "call": "generate",
        "prompt": "Once",
        "n_predict": 5,
        "sampling": str(sampling),
        "stop": ["END", "FIN"],
    }
    shell("run", "-m", "MODEL", "--greedy", "--system", "Be brief.", "Hi")
    assert calls()[1]["sampling"] == str(minfer.Sampling.greedy())
    assert calls()[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    shell("run", "-m", "MODEL", "Hi")
    assert calls()[1]["sampling"] == str(minfer.Sampling())


def test_help_states_the_true_defaults():
    reference = (ROOT / "docs" / "cli.md").read_text()
    for flag, field in {"temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p"}.items():
        assert re.search(rf"`--{flag}`.*\[default: {getattr(minfer.Sampling(), field)}[;\]]", reference)
    assert minfer.Sampling().repeat_penalty == 1
    assert re.search(r"`--repeat-penalty`.*\[default: 1, off\]", reference)


@pytest.mark.parametrize("how", ["dash", "nothing", "file", "file dash"])
def test_prompt_from_elsewhere(shell, calls, tmp_path, how):
    text = "zwei Zeilen\nmit Ümlaut\n"
    (tmp_path / "prompt.txt").write_text(text)
    words = {"dash": ["-"], "nothing": [], "file": ["-f", "prompt.txt"], "file dash": ["--file", "-"]}[how]
    done = shell("run", "-m", "MODEL", "--raw", *words, input=b"" if how == "file" else text.encode())
    assert done.stdout == "You said: zwei Zeilen\nmit Ümlaut\n"
    assert calls()[1]["prompt"] == "zwei Zeilen\nmit Ümlaut"


def test_prompt_argument_leaves_standard_input_alone(environment):
    # In `while read ...; do minfer run ...; done` the input belongs to the loop; and it may never end.
    child = subprocess.Popen(
        [*FAKE, "run", "-m", "MODEL", "x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert child.stdout.read() == "You said: user: x\n"
    assert child.wait(HANG) == 0
    child.stdin.close()
    child.stdout.close()


@pytest.mark.parametrize(
    ("words", "input", "code", "text"),
    [
        (
            ["run", "-m", "nowhere", "x"],
            b"",
            1,
            "error: no such file, and no model by that name in the cache: 'nowhere'",
        ),
        (
            ["run", "-m", "MODEL", "--device", "abacus", "x"],
            b"",
            1,
            "error: no device named 'abacus'; expected auto or fake",
        ),
        (["run", "-m", "MODEL", "--top-p", "7", "x"], b"", 1, "error: top_p is 7.0; it must be a number from 0 to 1"),
        (
            ["run", "-m", "MODEL", "-f", "missing.txt"],
            b"",
            1,
            "error: the prompt cannot be read from missing.txt: No such",
        ),
        (["run", "-m", "MODEL"], b"ab\xffcd", 1, "from standard input is not UTF-8: byte 0xff at offset 2"),
        (["run", "-m", "MODEL"], b"", 2, "error: the prompt is empty"),
        (["run", "-m", "MODEL", "a\udcffb"], b"", 1, "error: the prompt is not UTF-8"),
        (["run", "-m", "MODEL", ""], b"", 2, "error: the prompt is empty"),
        (
            ["run", "-m", "MODEL", "-f", "a", "x"],
            b"",
            2,
            "error: a prompt and --file were both given; give one of them",
        ),
        (["run", "-m", "MODEL", "--raw", "--system", "s", "x"], b"", 2, "error: --system needs the chat template"),
        (
            ["run", "-m", "MODEL", "--greedy", "--temp", "1", "x"],
            b"",
            2,
            "error: --greedy and --temp contradict each other",
        ),
        (["run", "--top-k", "many", "x"], b"", 2, "Invalid value for '--top-k'"),
        (["run", "--topk", "1", "x"], b"", 2, "No such option: --topk"),
        (["walk"], b"", 2, "No such command 'walk'"),
        (["pull", "hf:nonsense"], b"", 1, "error: 'hf:nonsense' is not understood; expected hf:owner/repo[:file]"),
        (["rm", "nothing"], b"", 1, "error: no such file, and no model"),
        (["inspect", "missing.gguf"], b"", 1, "error: no such file"),
        (["plan", "-m", "missing.gguf"], b"", 1, "error: no such file"),
    ],
)
def test_mistakes_are_said_without_a_traceback(shell, words, input, code, text):
    done = shell(*words, input=input)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert code in EXIT_CODES


@pytest.mark.parametrize(("closing", "code"), [("<&-", 2), (">&-", 0), ("2>&-", 0)])
def test_closed_streams(environment, closing, code):
    words = "" if closing == "<&-" else "hello"
    command = f"'{FAKE[0]}' '{FAKE[1]}' run -m MODEL {words} {closing}"
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)


def test_terminal_of_another_encoding(environment):
    command = [*FAKE, "run", "-m", "MODEL", "für 日本"]
    done = subprocess.run(
        command, env={**environment, "PYTHONIOENCODING": "latin-1"}, capture_output=True, timeout=HANG
    )
    assert (done.returncode, done.stdout) == (0, "You said: user: für ??\n".encode("latin-1"))


def test_warnings_are_notes(shell, monkeypatch):
    def load(model, **how):
        warnings.warn("no pre-tokenizer is named; gpt-2 is assumed", stacklevel=1)
        return fake.load(model, **how)

    monkeypatch.setattr(minfer, "load", load, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = shell("run", "-m", "MODEL", "x")
    assert done.stderr == "warning: no pre-tokenizer is named; gpt-2 is assumed\ndevice: fake\n"


def test_an_upload_is_a_note_once(shell):
    done = shell("run", "-m", "MODEL", "x", FAKE_UPLOAD="1")
    assert done.stderr == "uploading weights to fake\ndevice: fake\n"


def test_no_limit(shell, calls):
    shell("run", "-m", "MODEL", "-n", "-1", "x")
    assert calls()[1]["n_predict"] is None


def test_model_without_template(shell):
    done = shell("run", "-m", "MODEL", "x", FAKE_TEMPLATE="none")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: the model has no chat template; use --raw to complete plain text" in done.stderr
    assert shell("run", "-m", "MODEL", "--raw", "x", FAKE_TEMPLATE="none").stdout == "You said: x\n"
    assert shell("chat", "-m", "MODEL", FAKE_TEMPLATE="none").returncode == 1


def test_stats_explain_and_a_full_context(shell):
    done = shell("run", "-m", "MODEL", "--stats", "--explain", "--raw", "abc", FAKE_ANSWER="full")
    assert done.stdout == "You said: abc\n"
    assert done.stderr.splitlines() == [
        "placement  all on fake",
        "the context of 8 tokens is full, the answer ends here; --n-ctx sets its size",
        "prompt 3 tokens, 0.50 s (20.0 tokens/s); answer 1 tokens, 2.00 s (4.5 tokens/s)",
    ]


def test_reader_that_leaves(environment):
    child = subprocess.Popen(
        [*FAKE, "run", "-m", "MODEL", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "FAKE_ANSWER": "endless"},
    )
    assert child.stdout.read(8) == b"on and o"
    child.stdout.close()
    assert (child.wait(HANG), child.stderr.read()) == (141, b"device: fake\n")
    child.stderr.close()


def test_ctrl_c_ends_run(environment, tmp_path):
    child = subprocess.Popen(
        [*FAKE, "run", "-m", "MODEL", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "FAKE_ANSWER": "endless"},
        preexec_fn=interruptible,
    )
    assert child.stdout.read(8) == b"on and o"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=HANG)
    assert (child.returncode, out[-1:], err) == (130, b"\n", b"device: fake\n")
    assert json.loads((tmp_path / "calls").read_text())[-1] == {"call": "close"}  # memory was given back


# ---- chat, over a pipe ----


def test_chat_keeps_the_conversation(shell):
    done = shell("chat", "-m", "MODEL", "--system", "S", input=b"a\n\nb\n/regen\n/clear\nc\n/quit\nnever\n")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "You said: system: S | user: a",
        "You said: system: S | user: a | assistant: You said: system: S | user: a | user: b",
        "You said: system: S | user: a | assistant: You said: system: S | user: a | user: b",
        "You said: system: S | user: c",
    ]


def test_chat_input_forms(shell):
    lines = b'"""\none\n\ntwo\n"""\n"""short"""\nthree \\\nfour\n//slash\n/nonsense\n/help\n'
    done = shell("chat", "-m", "MODEL", input=b"/clear\n".join([lines]))
    said = [text.split("user: ")[-1] for text in re.split(r"You said: ", done.stdout) if text]
    assert said[0] == "one\n\ntwo\n"
    assert [text.rstrip("\n") for text in said if "assistant" not in text][1:] == ["short", "three \nfour", "/slash"]
    assert "error: no command /nonsense; /help lists them" in done.stderr
    assert HELP in done.stderr


def test_chat_system(shell):
    done = shell("chat", "-m", "MODEL", input=b"/system\n/system New one\n/system\nhi\n/system Other\nho\n")
    assert "There is no system message." in done.stderr
    assert "System message: New one" in done.stderr
    first, second = done.stdout.splitlines()
    assert first == "You said: system: New one | user: hi"
    assert second.startswith("You said: system: Other | user: hi | assistant: ")


def test_chat_save_and_load(shell, tmp_path):
    saved = tmp_path / "talk.json"
    done = shell("chat", "-m", "MODEL", input=b"hi\xc3\xa4\n/save talk.json\nho\n/save talk.json\n")
    assert done.returncode == 0
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"] == "hiä"
    done = shell("chat", "-m", "MODEL", input=b"/load talk.json\nmore\n/save talk.json\n")
    assert done.stdout.startswith("You said: user: hiä | assistant: ")
    assert len(json.loads(saved.read_text())["messages"]) == 6
    before = saved.read_bytes()
    done = shell("chat", "-m", "MODEL", input=b"x\n/save talk.json\n/save\n/save no/where.json\n")
    assert "talk.json exists already; name another file" in done.stderr
    assert "error: /save needs a file name" in done.stderr
    assert "where.json cannot be written: No such file" in done.stderr
    assert saved.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", 'expected an object with a list "messages"'),
        (b'{"messages": 3}', "is not a saved conversation"),
        (b'{"messages": [{"role": "root", "content": ""}]}', "message 0 is not understood"),
        (b'{"messages": [{"role": "user", "content": ["x"]}]}', "message 0 is not understood"),
        (None, "cannot be read: No such file"),
    ],
)
def test_chat_load_refuses(shell, tmp_path, content, text):
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    done = shell("chat", "-m", "MODEL", input=b"first\n/load x.json\nsecond\n")
    assert text in done.stderr
    assert "user: first | assistant: " in done.stdout.splitlines()[1]  # the conversation is as it was
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_chat_says_that_the_context_is_full_and_goes_on(shell):
    done = shell("chat", "-m", "MODEL", input=b"a\ntoo long\n/regen\n")
    assert (
        "9 tokens do not fit: the context has 8 cells and 5 are in use. /clear begins anew; --n-ctx sets" in done.stderr
    )
    assert done.stdout == "You said: user: a\n" * 2
    assert "nothing was asked yet" in shell("chat", "-m", "MODEL", input=b"/regen\n").stderr


# ---- chat, at a terminal ----


class Terminal:
    """A program on a pseudo-terminal of its own."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.handle, side = pty.openpty()
        self.child = subprocess.Popen(
            [*FAKE, *arguments],
            stdin=side,
            stdout=side,
            stderr=side,
            env={**environment, "FAKE_TERMINAL": "1"},
            start_new_session=True,
            preexec_fn=interruptible,
        )
        os.close(side)
        self.seen = ""

    def until(self, text: str, within: int = HANG) -> str:
        """Everything up to and with `text`; what came before stays in `seen`."""
        end = time.monotonic() + within
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come: {self.seen[-500:]!r}"
            if select.select([self.handle], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.handle, 4096).decode("utf-8", "replace")
                except OSError:
                    assert text in self.seen, f"{text!r} did not come: {self.seen[-500:]!r}"
        got, _, self.seen = self.seen.partition(text)
        return got + text

    def type(self, text: str) -> None:
        os.write(self.handle, text.encode())

    def interrupt(self, text: str) -> None:
        """Ctrl-C until `text` comes: one that falls between readline's prompt and its wait is seen at the next key."""
        for _ in range(HANG):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.until(text, within=1)
                return
        raise AssertionError(f"{text!r} did not come: {self.seen[-500:]!r}")

    def end(self) -> int:
        code = self.child.wait(HANG)
        os.close(self.handle)
        return code


def test_ctrl_c_stops_the_answer_not_the_program(environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    terminal = Terminal(["chat", "-m", "MODEL"], {**environment, "FAKE_ANSWER": "endless"})
    terminal.until("leaves.")
    terminal.until("> ")
    terminal.type("talk\n")
    terminal.until("on and on")
    terminal.type("\x03")
    terminal.until("(stopped)")
    terminal.until("> ")
    terminal.interrupt("/quit or Ctrl-D leaves.")
    terminal.until("> ")
    terminal.type("/save talk.json\n")
    terminal.until("Saved 2 messages")
    terminal.until("> ")  # a Ctrl-D before the prompt would be the line discipline's, and lost
    terminal.type("\x04")
    assert terminal.end() == 0


def test_foreign_text_does_not_steer_the_terminal(environment, shell):
    assert (
        "\x1b[31mred\x1b]0;title" in shell("run", "-m", "MODEL", "x", FAKE_ANSWER="escape").stdout
    )  # a pipe gets it all
    terminal = Terminal(["run", "-m", "MODEL", "x"], {**environment, "FAKE_ANSWER": "escape"})
    seen = terminal.until("tab\there")
    assert "␛[31mred␛]0;title␇�2J\r\n" in seen
    terminal.end()


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_only_for_who_wants_them(environment, shell, variables, coloured):
    terminal = Terminal(["run", "-m", "nowhere", "x"], {**environment, **variables})
    seen = terminal.until("pypi:package")
    assert ("\x1b[31merror:\x1b[0m" in seen) is coloured
    assert ("\x1b" in seen) is coloured
    assert terminal.end() == 1
    assert "\x1b" not in shell("run", "-m", "nowhere", "x").stderr


# ---- the other commands ----


@pytest.fixture
def model_file(tmp_path):
    """A GGUF file of no architecture that runs, with metadata that would steer a terminal."""
    path = tmp_path / "odd.gguf"
    metadata = {"general.architecture": "odd", "general.name": "a\x1b[31m\nb" + "x" * 200, "odd.list": np.arange(50)}
    write_model(path, metadata, [Tensor.of("w", np.zeros((4, 8), np.float32))])
    return path


def test_plan(shell):
    assert shell("plan", "-m", "MODEL", "--n-tokens", "3").stdout == "a plan for 3 tokens\n"
    assert json.loads(shell("plan", "-m", "MODEL", "--json").stdout) == {"n_tokens": 1}


def test_inspect(shell, model_file):
    text = shell("inspect", str(model_file)).stdout
    assert "GGUF version 3" in text
    assert re.search(r"odd\.list +int64\[50\] +\[0, 1, 2, .*, \.\.\.\]", text)
    assert re.search(r"F32 +1 tensors +128 bytes", text)
    assert re.search(r"reference +cannot run it: .*architecture 'odd' is not supported", text)
    assert re.search(r"w +F32 +8 x 4 +128 bytes", shell("inspect", "--tensors", str(model_file)).stdout)
    data = json.loads(shell("inspect", "--json", str(model_file)).stdout)
    assert data["tensors"] == {"w": {"format": "F32", "shape": [8, 4], "bytes": 128}}
    assert data["metadata"]["odd.list"] == {"type": "int64", "value": list(range(50))}
    assert data["bytes"] == model_file.stat().st_size


def test_inspect_of_what_is_no_model(shell, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"<html>")
    done = shell("inspect", "x.gguf")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")


def test_list_pull_rm(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    empty = shell("list")
    assert (empty.stdout, "no models in" in empty.stderr) == ("", True)
    place = cache.staging("ollama:tiny:latest")
    (place / "x").write_bytes(b"GGUF" + bytes(996))
    entry = cache.commit("ollama:tiny:latest", [cache.Fetched(place / "x", "tiny.gguf", cache.sha256_of(place / "x"))])
    (cache.staging("ollama:big:latest") / "0.part").write_bytes(bytes(2000))
    listed = shell("list")
    assert [line.split() for line in listed.stdout.splitlines()[1:]] == [
        ["tiny", "1.2", "kB", "ollama:tiny:latest"],
        ["ollama:big:latest", "2.0", "kB", "ollama:big:latest"],
    ]
    assert "unfinished: ollama:big:latest; go on with minfer pull, or drop it with minfer rm" in listed.stderr
    data = json.loads(shell("list", "--json").stdout)
    assert (data[0]["path"], data[0]["sha256"]) == (str(entry.path), {"tiny.gguf": entry.files[0].sha256})
    pulled = shell("pull", "tiny")
    assert (pulled.stdout, pulled.returncode) == (f"{entry.path}\n", 0)
    assert "already here, and unchanged: tiny" in pulled.stderr
    removed = shell("rm", "tiny", "ollama:big:latest")
    assert re.fullmatch(r"removed tiny \(1\.2 kB\)\nremoved ollama:big:latest \(2\.0 kB\)\n", removed.stdout)
    assert shell("list").stdout == ""


def test_completion(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "cache"))
    place = cache.staging("ollama:tiny:latest")
    (place / "x").write_bytes(b"GGUF")
    cache.commit("ollama:tiny:latest", [cache.Fetched(place / "x", "tiny.gguf", "0" * 64)])
    assert (
        "_MINFER_COMPLETE"
        in shell("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
    )

    def complete(words: str) -> list[str]:
        count = len(words.split(" ")) - 1
        return shell(_MINFER_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count)).stdout.split()

    assert complete("minfer in") == ["inspect"]
    assert "--top-k" in complete("minfer run --top")
    assert complete("minfer rm ti") == ["tiny"]


HEAVY = ["numpy", "rich", "httpx", "huggingface_hub", "jinja2", "tokenizers"]


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"], ["list"]])
def test_start_up_is_light(environment, words):
    code = f"import sys\nfrom minfer.cli import main\ntry: main({words!r})\nexcept SystemExit: pass\n"
    code += f"print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
