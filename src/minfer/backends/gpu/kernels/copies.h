// Copies into threadgroup memory that go on while the kernel does, as NVIDIA's `cp.async` has them; elsewhere they are done
// at once. Copies since `end_copies` was last called are one group; groups end in order. What a thread copied is there for
// it after `wait_for_copies`, which lets its last `left` groups be under way, and for others after a barrier.
#pragma once
#include "common.h"

#ifdef MINFER_CUDA
inline void copy16(threadgroup void * to, device const void * from) { msl_cuda::copy16(to, from); }
inline void copy16(threadgroup void * to, device const void * from, uint n) { msl_cuda::copy16(to, from, n); }
inline void end_copies() { msl_cuda::end_copies(); }
template <uint left> inline void wait_for_copies() { msl_cuda::wait_for_copies<left>(); }
#else
// 16 bytes, at places that are multiples of that; or their first n, and zeros for the rest. Of another place they are not the
// bytes that are there, as they are not on a GPU.
inline void copy16(threadgroup void * to, device const void * from, uint n) {
    device const uchar * begin = (device const uchar *)from - ((ulong)from & 15);
    for (uint i = 0; i < 16; i++) ((threadgroup uchar *)to)[i] = i < n ? begin[i] : uchar(0);
}
inline void copy16(threadgroup void * to, device const void * from) { copy16(to, from, 16); }
inline void end_copies() {}
template <uint left> inline void wait_for_copies() {}
#endif
