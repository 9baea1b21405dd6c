#!/usr/bin/env bash
# The recorded op cases on builds that Python cannot load here.
#
#   check.sh asan     address and undefined-behaviour sanitizers
#   check.sh tsan     thread sanitizer, four threads
#   check.sh neon     the NEON path, cross-compiled by zig (PyPI: ziglang), under qemu-aarch64 (Debian: qemu-user)
#   check.sh avx512   the AVX-512 path, its intrinsics emulated (avx512_emulated.h): for processors without them
#
# PYTHON (default python3) has minfer, and ziglang for neon; CXX names another compiler. CASES keeps only the cases whose
# name has this text.
set -euo pipefail

kind=${1:?asan, tsan, neon or avx512}
here=$(cd "$(dirname "$0")" && pwd)
native=$(cd "$here/../../../../src/minfer/backends/cpu/native" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" "$here/record.py" "$work/cases" ${CASES:+"$CASES"}

compiler=(${CXX:-c++})
flags=(-std=gnu++17 -O2 -g -ffp-contract=off -fno-math-errno -Wno-psabi -I"$native")
baseline=(attn dequantize dispatch kernels_portable ops pool program project rank)
avx2="-mavx2 -mfma -mf16c"
avx512="$avx2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni"
isas=(kernels_avx2 kernels_avx512)
runner=()
threads=2
case $kind in
  asan) flags+=(-O1 -fsanitize=address,undefined -fno-sanitize-recover=all) ;;
  tsan) flags+=(-O1 -fsanitize=thread) threads=4 ;;
  neon)
    compiler=("$python" -m ziglang c++ -target aarch64-linux-musl)
    isas=(kernels_neon)
    runner=(qemu-aarch64)
    ;;
  avx512)
    avx512="$avx2 -include $here/avx512_emulated.h"
    flags+=(-DMINFER_EMULATED=kAvx512)
    ;;
  *) echo "unknown check $kind" >&2; exit 2 ;;
esac

compile() { # source, object, flags of its own
  # shellcheck disable=SC2086
  "${compiler[@]}" "${flags[@]}" $3 -c "$1" -o "$work/$2.o"
}
jobs=()
for name in "${baseline[@]}"; do
  compile "$native/$name.cpp" "$name" "" &
  jobs+=($!)
done
for name in "${isas[@]}"; do
  case $name in
    *avx2) own=$avx2 ;;
    *avx512) own=$avx512 ;;
    *neon) own="-mcpu=generic+dotprod" ;;
  esac
  compile "$native/$name.cpp" "$name" "$own" &
  jobs+=($!)
done
compile "$here/replay.cpp" replay "" &
jobs+=($!)
for job in "${jobs[@]}"; do wait "$job"; done
"${compiler[@]}" "${flags[@]}" "$work"/*.o -pthread -o "$work/replay"

export ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=halt_on_error=1
case $kind in
  neon) names=(neon) ;;
  avx512) names=(avx512) ;;
  *)
    names=(portable)
    for name in avx2 avx512; do
      # Only what this processor runs.
      if "$python" -c "from minfer.backends.cpu import CpuBackend; CpuBackend(isa='$name')" 2>/dev/null; then
        names+=("$name")
      fi
    done
    ;;
esac
for name in "${names[@]}"; do
  MINFER_CPU=$name "${runner[@]}" "$work/replay" "$work/cases" "$threads"
done
