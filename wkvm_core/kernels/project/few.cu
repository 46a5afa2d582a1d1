// Products of at most eight rows of activations, on the tensor cores, at the speed at which the weights come.
//
// A block owns 16 rows of the packed matrix and one part of the inner axis; its warps share that part out. In a fragment
// of mma.m16n8k16 the order of the inner axis is free as long as both operands agree, so a lane takes 16 contiguous bytes
// of its row, which are the operands of two products, and nothing passes through shared memory. A warp asks for its first
// weights before it waits for the launch that makes the activations.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct half_t { u16 bits; };
struct bfloat_t { u16 bits; };

__device__ __forceinline__ void narrow(float x, float& y) { y = x; }
__device__ __forceinline__ void narrow(float x, half_t& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ __forceinline__ void narrow(float x, bfloat_t& y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

__device__ __forceinline__ void multiply(half_t, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(bfloat_t, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Weights are read once: they pass the first-level cache by.
__device__ __forceinline__ uint4 streamed(const void* from) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

__device__ __forceinline__ float activated(float y, int act) {
    if (act == 1) return 2.0f * __fdividef(1.0f, 1.0f + __expf(-2.0f * y)) - 1.0f;
    if (act == 2) return __fdividef(1.0f, 1.0f + __expf(-y));
    if (act == 3) return y <= 0.0f ? 0.0f : y * y;  // NaN stays
    return y;
}

// Grid (N / 16, parts), 32 * WARPS threads. x: T [P][tokens <= 8][inner], weight: T [N][inner], table: int [N / 64][2] plane and
// activation; out: O [parts][tokens][N]. `share` is a part's length over WARPS, a multiple of 256.
template <typename T, typename O, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, 12 / WARPS)
    few(const T* x, i64 x_plane, i64 x_row, const T* weight, const int* table, O* out, i64 out_plane, i64 out_row, int tokens,
        int inner, int share) {
    constexpr int DEPTH = 8;  // products of 32 of the inner axis a round
    __shared__ float sums[WARPS][16][8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, row = lane >> 2, first = blockIdx.x * 16;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int from = (blockIdx.y * WARPS + warp) * share + (lane & 3) * 8;
    const T* upper = weight + (i64)(first + row) * inner + from;
    const T* lower = upper + (i64)8 * inner;
    const int plane = table[first / 64 * 2], act = table[first / 64 * 2 + 1];
    uint4 now[DEPTH][2], next[DEPTH][2], b[DEPTH];
#pragma unroll
    for (int n = 0; n < DEPTH; n++) now[n][0] = streamed(upper + 32 * n), now[n][1] = streamed(lower + 32 * n);
    if (share > 32 * DEPTH)
#pragma unroll
        for (int n = 0; n < DEPTH; n++)
            next[n][0] = streamed(upper + 32 * (DEPTH + n)), next[n][1] = streamed(lower + 32 * (DEPTH + n));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const T* mine = x + plane * x_plane + row * x_row + from;
    const bool there = row < tokens;
    float c[4] = {0, 0, 0, 0};
    for (int at = 0; at < share; at += 32 * DEPTH) {
#pragma unroll
        for (int n = 0; n < DEPTH; n++)
            b[n] = there ? *reinterpret_cast<const uint4*>(mine + at + 32 * n) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int n = 0; n < DEPTH; n++) {
            multiply(T(), c, now[n][0].x, now[n][1].x, now[n][0].y, now[n][1].y, b[n].x, b[n].y);
            multiply(T(), c, now[n][0].z, now[n][1].z, now[n][0].w, now[n][1].w, b[n].z, b[n].w);
        }
#pragma unroll
        for (int n = 0; n < DEPTH; n++) now[n][0] = next[n][0], now[n][1] = next[n][1];
        if (at + 64 * DEPTH < share)
#pragma unroll
            for (int n = 0; n < DEPTH; n++)
                next[n][0] = streamed(upper + at + 32 * (2 * DEPTH + n)), next[n][1] = streamed(lower + at + 32 * (2 * DEPTH + n));
    }
    const int column = (lane & 3) * 2;
    sums[warp][row][column] = c[0], sums[warp][row][column + 1] = c[1];
    sums[warp][row + 8][column] = c[2], sums[warp][row + 8][column + 1] = c[3];
    __syncthreads();
    if (threadIdx.x < 128) {
        const int output = threadIdx.x & 15, token = threadIdx.x >> 4;
        float total = 0;
#pragma unroll
        for (int n = 0; n < WARPS; n++) total += sums[n][output][token];
        if (token < tokens)
            narrow(activated(total, act), out[blockIdx.y * out_plane + token * out_row + first + output]);
    }
}
