// What a kernel in CUDA C++ needs to be compiled by g++ or clang++ and run on a CPU: emulator.cpp runs it.
// Loads and stores of the kernel are seen because its file alone is compiled with -fsanitize=thread.
#pragma once
#include <assert.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>
#include <utility>

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
struct cuda_place { uint3 thread, block; dim3 threads, blocks; };
union cuda_argument { void* pointer; double number; };

extern "C" {
extern cuda_place* cuda_now;  // of the thread that runs
void __syncthreads();
int __syncthreads_count(int predicate);
void __syncwarp(unsigned mask = 0xffffffffu);
unsigned __ballot_sync(unsigned mask, int predicate);
unsigned cuda_shuffle(unsigned mask, unsigned value, int from);  // the value of lane `from` of the warp
int cuda_lane();
void cuda_copy(void* to, const void* from, int bytes);  // one access of 8 or 16 bytes
void cuda_atomic(void* at, int bytes);
}

#define threadIdx (cuda_now->thread)
#define blockIdx (cuda_now->block)
#define blockDim (cuda_now->threads)
#define gridDim (cuda_now->blocks)
#define warpSize 32
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#ifndef __restrict__
#define __restrict__ __restrict
#endif
#define __shared__ static __attribute__((section("cuda_shared"), used))

// Values of 8 and 16 bytes move in one access, as on the GPU: a compiler would split them.
#define CUDA_VECTOR(NAME, T, BYTES, ...)                                                              \
    struct alignas(BYTES) NAME {                                                                      \
        T __VA_ARGS__;                                                                                \
        constexpr NAME() = default;                                                                           \
        __attribute__((always_inline)) NAME(const NAME& o) { cuda_copy(this, &o, BYTES); }            \
        __attribute__((always_inline)) NAME& operator=(const NAME& o) {                               \
            cuda_copy(this, &o, BYTES);                                                               \
            return *this;                                                                             \
        }
#define CUDA_PAIR(NAME, T, BYTES) CUDA_VECTOR(NAME, T, BYTES, x = 0, y = 0) NAME(T x, T y) : x(x), y(y) {} }; \
    inline NAME make_##NAME(T x, T y) { return NAME(x, y); }
#define CUDA_FOUR(NAME, T) CUDA_VECTOR(NAME, T, 16, x = 0, y = 0, z = 0, w = 0)                       \
    NAME(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {} };                           \
    inline NAME make_##NAME(T x, T y, T z, T w) { return NAME(x, y, z, w); }
CUDA_PAIR(float2, float, 8)
CUDA_PAIR(int2, int, 8)
CUDA_PAIR(uint2, unsigned, 8)
CUDA_PAIR(double2, double, 16)
struct float3 { float x, y, z; };
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
CUDA_FOUR(float4, float)
CUDA_FOUR(int4, int)
CUDA_FOUR(uint4, unsigned)

#define CUDA_INLINE __attribute__((always_inline)) inline  // the place in the code stays the kernel's line
template <class T> CUDA_INLINE T cuda_move(unsigned mask, T value, int from) {
    unsigned word[(sizeof(T) + 3) / 4] = {};
    memcpy(word, &value, sizeof(T));
    for (unsigned& w : word) w = cuda_shuffle(mask, w, from);
    memcpy(&value, word, sizeof(T));
    return value;
}
template <class T> CUDA_INLINE T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
    return cuda_move(mask, v, cuda_lane() / width * width + lane % width);
}
template <class T> CUDA_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    int me = cuda_lane();
    return cuda_move(mask, v, me % width + int(delta) < width ? me + int(delta) : me);
}
template <class T> CUDA_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
    int me = cuda_lane();
    return cuda_move(mask, v, me % width >= int(delta) ? me - int(delta) : me);
}
template <class T> CUDA_INLINE T __shfl_xor_sync(unsigned mask, T v, int other, int width = 32) {
    int me = cuda_lane(), at = me ^ other;
    return cuda_move(mask, v, at / width == me / width ? at : me);
}
CUDA_INLINE int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
CUDA_INLINE int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
CUDA_INLINE int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
CUDA_INLINE int __syncthreads_and(int p) { return __syncthreads_count(!p) == 0; }

#define CUDA_UNSEEN __attribute__((no_sanitize("thread"), noinline))
#define CUDA_ATOMIC(NAME, ...)                                                          \
    template <class T, class U> CUDA_UNSEEN T cuda_##NAME(T* at, U with) {              \
        T old = *at, value = T(with);                                                   \
        *at = __VA_ARGS__;                                                              \
        return old;                                                                     \
    }                                                                                   \
    template <class T, class U> __attribute__((always_inline)) inline T NAME(T* at, U with) { \
        cuda_atomic(at, sizeof(T));                                                     \
        return cuda_##NAME(at, with);                                                   \
    }
CUDA_ATOMIC(atomicAdd, old + value)
CUDA_ATOMIC(atomicSub, old - value)
CUDA_ATOMIC(atomicMax, old > value ? old : value)
CUDA_ATOMIC(atomicMin, old < value ? old : value)
CUDA_ATOMIC(atomicExch, value)
CUDA_ATOMIC(atomicAnd, old & value)
CUDA_ATOMIC(atomicOr, old | value)
CUDA_ATOMIC(atomicXor, old ^ value)
template <class T> CUDA_UNSEEN T cuda_swap(T* at, T was, T value) {
    T old = *at;
    if (old == was) *at = value;
    return old;
}
template <class T, class U, class V> CUDA_INLINE T atomicCAS(T* at, U was, V value) {
    cuda_atomic(at, sizeof(T));
    return cuda_swap(at, T(was), T(value));
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) {}
template <class T> CUDA_INLINE T __ldg(const T* at) { return *at; }
template <class T> CUDA_INLINE T __ldca(const T* at) { return *at; }
template <class T> CUDA_INLINE T __ldcg(const T* at) { return *at; }
template <class T> CUDA_INLINE T __ldcs(const T* at) { return *at; }
template <class T> CUDA_INLINE void __stcs(T* at, T value) { *at = value; }

// CUDA's min and max take mixed integers and floats.
template <class A, class B> std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
inline float __expf(float x) { return expf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0), 1); }
#define __logf logf
#define __sinf sinf
#define __cosf cosf
#define __powf powf
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
CUDA_INLINE int __float_as_int(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
CUDA_INLINE float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }

template <class T> T cuda_value(cuda_argument a) {
    if constexpr (std::is_pointer_v<T>) return (T)a.pointer;
    else return (T)a.number;
}
template <class... A, size_t... I>
CUDA_UNSEEN void cuda_call(void (*kernel)(A...), const cuda_argument* a, std::index_sequence<I...>) {
    kernel(cuda_value<A>(a[I])...);
}
template <class... A> CUDA_UNSEEN void cuda_call(void (*kernel)(A...), const cuda_argument* a) {
    cuda_call(kernel, a, std::index_sequence_for<A...>{});
}
#define __align__(n) __attribute__((aligned(n)))
#define alignas(n) __attribute__((aligned(n)))  // g++ takes the attribute between `__shared__` and the type
