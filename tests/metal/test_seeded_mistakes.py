"""The fake bites: one mistake at a time is put into the Metal device's own text, and must be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fakemetal import Runtime, installed
from scenario import FOLDER, exercise, mutated

if TYPE_CHECKING:
    from pathlib import Path

DEVICE, ENCODE, BRIDGE = "__init__.py", "encode.py", "bridge.py"
AN_M1, AN_OLD_MACOS = {"family": 1007}, {"macos": (14,)}

#: What is wrong: (file, text, text with the mistake, what the fake says).
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "misspelt selector": (DEVICE, "newSharedEvent()", "newSharedEvnt()", "no method"),
    "selector of another object": (
        ENCODE,
        "encoder.memoryBarrierWithScope_",
        "self._device.gpu.memoryBarrierWithScope_",
        "no method",
    ),
    "missing argument": (
        ENCODE,
        "_atIndex_(args, len(args), 0)",
        "_atIndex_(args, len(args))",
        "takes 3 arguments, 2 given",
    ),
    "one argument too many": (DEVICE, "commands.commit()", "commands.commit(None)", "takes 0 arguments, 1 given"),
    "wrong constant": (
        DEVICE,
        "self.metal.MTLResourceStorageModeShared, None",
        "self.metal.MTLBarrierScopeBuffers, None",
        "is no MTLResourceOptions",
    ),
    "constant that does not exist": (
        ENCODE,
        "metal.MTLBarrierScopeBuffers",
        "metal.MTLBarrierScopeBuffer",
        "Metal has no",
    ),
    "barrier for the wrong memory": (
        ENCODE,
        "metal.MTLBarrierScopeBuffers",
        "metal.MTLBarrierScopeTextures",
        "does not cover buffers",
    ),
    "out-parameter not passed": (DEVICE, "(text, options, None)", "(text, options)", "takes 3 arguments, 2 given"),
    "something passed as out-parameter": (
        DEVICE,
        "(text, options, None)",
        "(text, options, [])",
        "is an out-parameter",
    ),
    "view longer than its buffer": (DEVICE, "as_buffer(length)", "as_buffer(length + 1)", "of a buffer of"),
    "array shorter than its count": (
        ENCODE,
        "(self._read, len(self._read), ",
        "(self._read, len(self._read) + 1, ",
        "is an array of",
    ),
    "bytes shorter than their length": (
        ENCODE,
        "(args, len(args), 0)",
        "(args[:4], len(args), 0)",
        "requesting buffer of",
    ),
    "setBytes over 4 KiB": (ENCODE, "(args, len(args), 0)", "(args.ljust(5000), 5000, 0)", "set_bytes of 5000 bytes"),
    "bytes where an address is wanted": (DEVICE, "ctypes.addressof(cell)", "bytes(cell)", "is an address as a number"),
    "Python's bytes as shared memory": (
        DEVICE,
        "                memory, length,",
        "                bytes(memory), length,",
        "bytes where an address is wanted",
    ),
    "no-copy memory that is not whole pages": (DEVICE, "// PAGE) * PAGE", "// 4096) * 4096", "not whole pages"),
    "private memory read by the host": (
        DEVICE,
        "(length, self.metal.MTLResourceStorageModeShared)",
        "(length, self.metal.MTLResourceStorageModePrivate)",
        "buffers are shared",
    ),
    "wrong type of a function constant": (
        DEVICE,
        '("MTLDataTypeUInt", ',
        '("MTLDataTypeUShort", ',
        "is uint, not ushort",
    ),
    "size of two numbers": (
        ENCODE,
        "(int(step.launch.threads), 1, 1)",
        "(int(step.launch.threads), 1)",
        "struct of 3 numbers",
    ),
    "a float where an integer belongs": (ENCODE, "start, 0)", "float(start), 0)", "is NSUInteger in"),
    "a number for BOOL": (
        DEVICE,
        "setSupportIndirectCommandBuffers_(True)",
        "setSupportIndirectCommandBuffers_(1)",
        "is BOOL",
    ),
    "property set as an attribute": (
        DEVICE,
        "descriptor.setLabel_(launch.kernel)",
        "descriptor.label = launch.kernel",
        "properties are methods",
    ),
    "object of another kind": (
        ENCODE,
        "_withRange_(self._commands,",
        "_withRange_(self._arena.object,",
        "is MTLIndirectCommandBuffer",
    ),
    "encoding after endEncoding": (
        ENCODE,
        "encoder.executeCommandsInBuffer",
        "encoder.endEncoding()\n            encoder.executeCommandsInBuffer",
        "encoding after endEncoding",
    ),
    "no endEncoding": (
        ENCODE,
        "            encoder.endEncoding()  # Metal",
        "            pass  # Metal",
        "released without endEncoding",
    ),
    "committed twice": (
        DEVICE,
        "commands.commit()",
        "commands.commit()\n            commands.commit()",
        "committed twice",
    ),
    "signal encoded after the commit": (
        DEVICE,
        "            encode(commands)\n",
        "            encode(commands)\n            commands.commit()\n",
        "before the commit",
    ),
    "no autorelease pool": (
        DEVICE,
        "        with self.objc.autorelease_pool():\n",
        "        if True:\n",
        "there is no pool",
    ),
    "reference never given back": (BRIDGE, '"already_retained": True', '"already_retained": False', "never released"),
    "metadata without its out-parameters": (
        BRIDGE,
        '4: {"type": b"^@", "type_modifier": b"o"}',
        '4: {"type": b"^@"}',
        "must say so again",
    ),
    "metadata for the protocol's name": (
        BRIDGE,
        'b"NSObject", selector',
        'b"MTLDevice", selector',
        "under NSObject only",
    ),
    "released by hand": (
        DEVICE,
        "            made.setLabel_(label)\n            # Metal",
        "            made.setLabel_(label)\n            made.release()\n            # Metal",
        "after it was released",
    ),
    "fast math": (DEVICE, "metal.MTLMathModeSafe", "metal.MTLMathModeFast", "without fast math"),
    "another language version": (DEVICE, "metal.MTLLanguageVersion3_1", "metal.MTLLanguageVersion3_0", "as MSL 3.1"),
    "residency set, nobody asked": (
        DEVICE,
        "if not self.objc.macos_available(15, 0):",
        "if False:",
        "nothing asked whether it is there",
    ),
    "indirect offset past 4 GiB": (
        ENCODE,
        "int(b.offset), b.slot)",
        "int(b.offset) + (1 << 32), b.slot)",
        "cannot be recorded",
    ),
    "indirect commands with too few slots": (ENCODE, "BindCount_(last + 1)", "BindCount_(last)", "made for 3"),
    "pipeline without indirect support": (
        DEVICE,
        "setSupportIndirectCommandBuffers_(True)",
        "setSupportIndirectCommandBuffers_(False)",
        "support_indirect_command_buffers",
    ),
    "buffers of a replay not resident": (ENCODE, "if self._written:", "if False:", "is not resident"),
    "unbounded wait": (DEVICE, "WAIT_SLICE_MS = 250", "WAIT_SLICE_MS = 10**9", "is not bounded"),
}

#: Mistakes that only some machines show, or that only the results show.
ON_A_MACHINE: dict[str, tuple[str, str, str, dict[str, object], str]] = {
    "pipelines not bound on an M1": (
        ENCODE,
        "if device.replayable() else []",
        "if False else []",
        AN_M1,
        "were not bound before",
    ),
    "math mode on macOS 14": (
        DEVICE,
        "            if self.objc.macos_available(15, 0):",
        "            if True:",
        AN_OLD_MACOS,
        "needs macOS",
    ),
    "residency set on macOS 14": (
        DEVICE,
        "if not self.objc.macos_available(15, 0):",
        "if False:",
        AN_OLD_MACOS,
        "needs macOS (15,)",
    ),
    "no barrier, encoded": (ENCODE, "            if barrier:", "            if False:", {"shuffle": True}, ""),
    "no barrier, replayed": (ENCODE, "            if step.barrier:", "            if False:", {"shuffle": True}, ""),
    "a write that does not wait": (DEVICE, "        self.synchronize()\n        raw", "        raw", {}, ""),
    "a read that does not wait": (
        DEVICE,
        "        self.synchronize()\n        return _part",
        "        return _part",
        {},
        "",
    ),
    "offset of a binding lost": (ENCODE, "(b.buffer.object, b.offset)", "(b.buffer.object, 0)", {}, ""),
    "slots shifted by one": (ENCODE, "(first, len(filled))", "(first + 1, len(filled))", {}, ""),
    "arguments of the launch before": (ENCODE, "starts.append(len(raw))", "starts.append(0)", {}, ""),
}


@pytest.fixture(autouse=True)
def _replay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_METAL_REPLAY", "1")


def _run(runtime: Runtime, tmp_path: Path, change: tuple[str, str, str]) -> None:
    with installed(runtime):
        module = mutated(tmp_path / "metal", *change)
        # The scenario replays what it is told to; the self-test has tests of its own.
        module.MetalDevice._may_replay = lambda self: True
        exercise(module.MetalDevice())
        del module


def _finds(runtime: Runtime, tmp_path: Path, change: tuple[str, str, str], said: str) -> None:
    """The run fails, and the reason is the one that is expected, not an accident of the change."""
    file, old, _ = change
    assert old in (FOLDER / file).read_text(), "the text that this mistake changes is gone: change the mistake with it"
    with pytest.raises(Exception) as caught:  # an AttributeError, a ContractError, or what follows from them
        _run(runtime, tmp_path, change)
    reasons = [str(caught.value), *map(str, runtime.errors)]
    assert any(said in reason for reason in reasons), reasons


@pytest.mark.parametrize("macos", [(14,), (15,), (26,)])
@pytest.mark.parametrize("family", [1007, 1009])
def test_without_a_mistake_nothing_is_found(tmp_path: Path, macos: tuple[int, ...], family: int) -> None:
    _run(Runtime(macos=macos, family=family), tmp_path, (DEVICE, "WAIT_S", "WAIT_S"))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    file, old, new, said = MISTAKES[name]
    runtime = Runtime()
    _finds(runtime, tmp_path, (file, old, new), said)


@pytest.mark.parametrize("name", ON_A_MACHINE)
def test_a_mistake_is_found_on_a_machine(name: str, tmp_path: Path) -> None:
    file, old, new, machine, said = ON_A_MACHINE[name]
    runtime = Runtime(**{k: v for k, v in machine.items() if k in ("family", "macos")})
    if machine.get("shuffle"):
        runtime.shuffle(seed=1)
    _finds(runtime, tmp_path, (file, old, new), said)
