// WKV-7 on the GPU: the decode step of many rows of one token, and the scan of rows of several tokens.
//
// Both keep a head's state [64 (value), 64 (key)] in registers, eight lanes a value row and eight keys a lane, and add up
// in the same order. Everything is float32 but what is stored.
// T: float, half or bfloat of activations; S: of the state. Pointers are given as bytes.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct half_t { u16 bits; };
struct bfloat_t { u16 bits; };

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(half_t x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ __forceinline__ float wide(bfloat_t x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ void narrow(float x, float& y) { y = x; }
__device__ __forceinline__ void narrow(float x, half_t& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ __forceinline__ void narrow(float x, bfloat_t& y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

template <typename T> struct CutBits;  // bits of float32 that T cuts off
template <> struct CutBits<float> { static const u32 value = 0; };
template <> struct CutBits<half_t> { static const u32 value = 13; };
template <> struct CutBits<bfloat_t> { static const u32 value = 16; };

// A lane's eight keys of 64. Of a float32 state they are two runs of four, so that a load of 16 bytes a lane reads whole
// sectors; of a 16-bit state one run of eight. `first` and `second` are where the runs begin.
template <typename S> struct Keys {
    static const bool split = sizeof(S) == 4;
    static __device__ __forceinline__ int first(int lane) { return (lane & 7) * (split ? 4 : 8); }
    static __device__ __forceinline__ int second(int lane) { return first(lane) + (split ? 32 : 4); }
};

template <typename T> struct Four;  // a load of four numbers
template <> struct Four<float> { typedef uint4 type; };
template <> struct Four<half_t> { typedef uint2 type; };
template <> struct Four<bfloat_t> { typedef uint2 type; };

// The lane's eight numbers of the 64 at `from`, which are aligned to 16 bytes.
template <typename S, typename T> __device__ __forceinline__ void fetch8(const T* from, int lane, T (&raw)[8]) {
    if constexpr (sizeof(T) == 2 && !Keys<S>::split) {
        *reinterpret_cast<uint4*>(raw) = *reinterpret_cast<const uint4*>(from + Keys<S>::first(lane));
    } else {
        typedef typename Four<T>::type four;
        *reinterpret_cast<four*>(raw) = *reinterpret_cast<const four*>(from + Keys<S>::first(lane));
        *reinterpret_cast<four*>(raw + 4) = *reinterpret_cast<const four*>(from + Keys<S>::second(lane));
    }
}

template <typename S, typename T> __device__ __forceinline__ void load8(const T* from, int lane, float (&to)[8]) {
    T raw[8];
    fetch8<S>(from, lane, raw);
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] = wide(raw[i]);
}

template <typename S> __device__ __forceinline__ void store8(S* to, int lane, const float (&from)[8]) {
    S raw[8];
#pragma unroll
    for (int i = 0; i < 8; i++) narrow(from[i], raw[i]);
    if constexpr (Keys<S>::split) {
        *reinterpret_cast<uint4*>(to + Keys<S>::first(lane)) = *reinterpret_cast<uint4*>(raw);
        *reinterpret_cast<uint4*>(to + Keys<S>::second(lane)) = *reinterpret_cast<uint4*>(raw + 4);
    } else {
        *reinterpret_cast<uint4*>(to + Keys<S>::first(lane)) = *reinterpret_cast<uint4*>(raw);
    }
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ float over_warp(float x) {
#pragma unroll
    for (int away = 16; away; away >>= 1) x += __shfl_xor_sync(~0u, x, away);
    return x;
}

__device__ __forceinline__ float dot8(const float (&x)[8], const float (&y)[8]) {
    float even = x[0] * y[0], odd = x[1] * y[1];
#pragma unroll
    for (int i = 2; i < 8; i += 2) even = fmaf(x[i], y[i], even), odd = fmaf(x[i + 1], y[i + 1], odd);
    return even + odd;
}

// Sums of eight values over the eight lanes that share a row; lane n of them gets the sum of x[n]. The additions are
// those of a butterfly with distances 1, 2, 4.
__device__ __forceinline__ float sums8(const float (&x)[8], int lane) {
    float half[4], quarter[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float keep = lane & 1 ? x[2 * i + 1] : x[2 * i], give = lane & 1 ? x[2 * i] : x[2 * i + 1];
        half[i] = keep + __shfl_xor_sync(~0u, give, 1);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float keep = lane & 2 ? half[2 * i + 1] : half[2 * i], give = lane & 2 ? half[2 * i] : half[2 * i + 1];
        quarter[i] = keep + __shfl_xor_sync(~0u, give, 2);
    }
    float keep = lane & 4 ? quarter[1] : quarter[0], give = lane & 4 ? quarter[0] : quarter[1];
    return keep + __shfl_xor_sync(~0u, give, 4);
}

__device__ __forceinline__ float over_eight(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 2);
    return x + __shfl_xor_sync(~0u, x, 4);
}

// One token on a value row; returns the lane's share of the read-out.
__device__ __forceinline__ float advance(float (&s)[8], float removed, const float (&r)[8], const float (&k)[8],
                                         const float (&w)[8], const float (&b)[8], float v) {
#pragma unroll
    for (int j = 0; j < 8; j++) s[j] = fmaf(removed, b[j], fmaf(s[j], w[j], v * k[j]));
    return dot8(s, r);
}

// Stochastic rounding: a 16-bit state is rounded up with the probability of the part cut off. The random bits are a hash
// of the token's value and key and of the element's place, so equal inputs give equal states.
__device__ __forceinline__ u32 hashed(float x, int place) {
    u32 mixed = (__float_as_uint(x) ^ (u32)(place + 1) * 0x9E3779B1u) * 0x85EBCA6Bu;
    return mixed ^ (mixed >> 15);
}
template <typename S> __device__ __forceinline__ void dither(float (&s)[8], u32 row, const u32 (&keys)[8]) {
    if constexpr (CutBits<S>::value) {
        const u32 cut = CutBits<S>::value;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 random = ((row ^ keys[j]) * 0xC2B2AE35u) >> (32 - cut);
            s[j] = __uint_as_float((__float_as_uint(s[j]) + random) & ~((1u << cut) - 1));
        }
    }
}

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_earlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Rows of `vectors`, float [8][C].
enum { V0, W0, A0, K_K, K_A, R_K, LN_WEIGHT, LN_BIAS };

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// A copy of BYTES from global to shared memory by the copy engine; `full` completes when it is there.
template <int BYTES> __device__ __forceinline__ void bulk_load(void* to, const void* from, i64* full) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)), "n"(BYTES) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "n"(BYTES), "r"(shared_address(full)) : "memory");
}

__device__ __forceinline__ void wait_full(i64* full, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(full)), "r"(phase) : "memory");
}

// Many rows of one token. Every warp goes alone through the heads of its own, `stride` warps apart, so that `stride`, a
// multiple of H, leaves it the same head of one row after another. The copy engine brings the states STAGES ahead, so that
// memory is busy while a warp computes. Decay, keys and gates are prepared here, group norm, bonus and gate applied.
// Lane l works on the value rows 4 n + l / 8, and alone on the channels 4 (l % 8) + l / 8 and that plus 32.
template <typename S> struct Stream {
    static const int warps = sizeof(S) == 4 ? 6 : 8, stages = sizeof(S) == 4 ? 2 : 3, bytes = 4096 * sizeof(S);
};

template <typename S, typename T, bool FIRST, bool DITHER>
__global__ void __launch_bounds__(Stream<S>::warps * 32, 1)
    stream(const S* state_in, S* state_out, i64 slot_stride, const i64* read, const i64* write, const T* rkv, i64 rkv_plane,
           i64 rkv_row, const T* low, i64 low_plane, i64 low_row, T* v_first, const float* vectors, T* out, int hidden, int rows,
           int stride) {
    constexpr int WARPS = Stream<S>::warps, STAGES = Stream<S>::stages;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ __align__(16) float all_planes[WARPS][5][64];  // r k w a b
    __shared__ float all_own[WARPS][8][64];
    __shared__ i64 all_full[WARPS][STAGES];
    const int heads = hidden / 64, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int mine = blockIdx.x * WARPS + warp, head = mine % heads, value = lane >> 3, channel = (lane & 7) * 4 + value;
    S* stage_memory = reinterpret_cast<S*>(memory) + warp * STAGES * 4096;
    float (&planes)[5][64] = all_planes[warp];
    i64* full = all_full[warp];
    launch_dependents();
    const int per_row = stride / heads;
    int row = mine / heads;
    if (mine >= stride || row >= rows) {
        wait_for_earlier();
        return;
    }
    // Slots and states are older than the launch before this one; vectors never change.
    if (lane == 0) {
        for (int stage = 0; stage < STAGES; stage++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + stage)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int stage = 0; stage < STAGES; stage++)
            if (row + stage * per_row < rows)
                bulk_load<Stream<S>::bytes>(stage_memory + stage * 4096,
                                            state_in + read[row + stage * per_row] * slot_stride + head * 4096, full + stage);
    }
    __syncwarp();
    float (&own)[8][64] = all_own[warp];
    for (int n = lane; n < 8 * 64; n += 32) own[n / 64][n % 64] = vectors[n / 64 * hidden + head * 64 + n % 64];
    __syncwarp();
    wait_for_earlier();
    T inputs[8][2];
    auto take = [&](i64 row) {
        const T* rkv_at = rkv + row * rkv_row + head * 64 + channel;
        const T* low_at = low + row * low_row + head * 64 + channel;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int n = 0; n < 3; n++) inputs[n][i] = rkv_at[n * rkv_plane + 32 * i];
#pragma unroll
            for (int n = 0; n < 4; n++) inputs[3 + n][i] = low_at[n * low_plane + 32 * i];
            if (!FIRST) inputs[7][i] = v_first[row * hidden + head * 64 + channel + 32 * i];
        }
    };
    take(row);
    int stage = 0;
    u32 phase = 0;
    i64 write_slot = write[row];
    for (; row < rows; row += per_row) {
        const bool more = row + STAGES * per_row < rows;
        const i64 read_slot = more ? read[row + STAGES * per_row] : 0;
        const i64 next_write_slot = row + per_row < rows ? write[row + per_row] : 0;
        float r[8], k[8], w[8], a[8], b[8], v[2], gate[2], bonus = 0;
        {
            float kk[2], rate[2], one_r[2], one_k[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int c = channel + 32 * i;
                one_r[i] = wide(inputs[0][i]);
                one_k[i] = wide(inputs[1][i]);
                v[i] = wide(inputs[2][i]);
                gate[i] = wide(inputs[6][i]);
                rate[i] = sigmoid(own[A0][channel + 32 * i] + wide(inputs[5][i]));
                planes[2][c] = __expf(-0.6065306597126334f * sigmoid(own[W0][channel + 32 * i] + wide(inputs[4][i])));
                if (FIRST) {
                    narrow(v[i], v_first[(i64)row * hidden + head * 64 + c]);
                } else {
                    v[i] += (wide(inputs[7][i]) - v[i]) * sigmoid(own[V0][channel + 32 * i] + wide(inputs[3][i]));
                }
                kk[i] = one_k[i] * own[K_K][channel + 32 * i];
                one_k[i] *= 1.0f + (rate[i] - 1.0f) * own[K_A][channel + 32 * i];
                bonus += one_r[i] * one_k[i] * own[R_K][channel + 32 * i];
            }
            float scale = rsqrtf(fmaxf(over_warp(kk[0] * kk[0] + kk[1] * kk[1]), 1e-24f));
            bonus = over_warp(bonus);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int c = channel + 32 * i;
                kk[i] *= scale;
                planes[0][c] = one_r[i];
                planes[1][c] = one_k[i];
                planes[3][c] = -kk[i];
                planes[4][c] = kk[i] * rate[i];
            }
        }
        __syncwarp();
        if (row + per_row < rows) take(row + per_row);
        load8<S>(planes[0], lane, r);
        load8<S>(planes[1], lane, k);
        load8<S>(planes[2], lane, w);
        load8<S>(planes[3], lane, a);
        load8<S>(planes[4], lane, b);
        u32 keys[8];
        if (DITHER)
#pragma unroll
            for (int j = 0; j < 8; j++) keys[j] = hashed(k[j], j < 4 ? Keys<S>::first(lane) + j : Keys<S>::second(lane) + j - 4);
        wait_full(full + stage, phase);
        const S* there = stage_memory + stage * 4096 + value * 64;
        S* to = state_out + write_slot * slot_stride + head * 4096 + value * 64;
        float y[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float s[8][8], shares[8];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                load8<S>(there + (8 * half + n) * 256, lane, s[n]);
                shares[n] = dot8(s[n], a);
            }
            if (half == 1) {  // everything is in registers: the next state may come
                __syncwarp();
                if (lane == 0 && more)
                    bulk_load<Stream<S>::bytes>(stage_memory + stage * 4096, state_in + read_slot * slot_stride + head * 4096,
                                                full + stage);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            const float removed = sums8(shares, lane);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const int holder = (lane & 24) + n;  // of row 4 (8 half + n) + value
                const float one = __shfl_sync(~0u, v[half], holder);
                shares[n] = advance(s[n], __shfl_sync(~0u, removed, holder), r, k, w, b, one);
                if (DITHER) dither<S>(s[n], hashed(one, 64 + 4 * (8 * half + n) + value), keys);
                store8(to + (8 * half + n) * 256, lane, s[n]);
            }
            y[half] = sums8(shares, lane);
        }
        const float mean = over_warp(y[0] + y[1]) * (1.0f / 64);
        y[0] -= mean, y[1] -= mean;
        const float scale = rsqrtf(over_warp(y[0] * y[0] + y[1] * y[1]) * (1.0f / 64) + 64e-5f);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float normed = y[i] * scale * own[LN_WEIGHT][channel + 32 * i] + own[LN_BIAS][channel + 32 * i];
            narrow((normed + bonus * v[i]) * gate[i], out[(i64)row * hidden + head * 64 + channel + 32 * i]);
        }
        write_slot = next_write_slot;
    }
}

template <int BYTES> __device__ __forceinline__ void copy_async(void* to, const void* from) {
    u32 shared = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void copies_begin() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_end() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Grid (H * 4 / ROWS, rows), 128 threads: 16 * ROWS value rows a block. Tokens come CHUNK at a time into shared memory,
// the next chunk while this one is worked on.
// planes: T [5][tokens][C] r k v a b; decay: float [tokens][C]; out: T [tokens][C], y.
template <typename S, typename T, int ROWS, bool DITHER>
__global__ void __launch_bounds__(128) scan(S* state, i64 slot_stride, const i64* read, const i64* write, const int* bounds,
                                            const T* planes, const float* decay, i64 tokens, T* out, int hidden) {
    constexpr int CHUNK = 32 / sizeof(T), PARTS = 4 / ROWS, PER_COPY = 16 / sizeof(T);
    __shared__ __align__(16) T staged[2][5][CHUNK][64];  // r k v a b
    __shared__ __align__(16) float decays[2][CHUNK][64];
    __shared__ __align__(16) T read_out[CHUNK][16 * ROWS];
    const int head = blockIdx.x / PARTS, part = blockIdx.x % PARTS, row = blockIdx.y, thread = threadIdx.x;
    const int lane = thread & 31, value = thread >> 3, first_value = part * 16 * ROWS;
    const int start = bounds[row], end = bounds[row + 1];
    if (start >= end) {
        launch_dependents();
        wait_for_earlier();
        return;
    }
    const i64 place = head * 4096 + (first_value + value) * 64;
    float s[ROWS][8];
#pragma unroll
    for (int i = 0; i < ROWS; i++) load8<S>(state + read[row] * slot_stride + place + i * 1024, lane, s[i]);
    wait_for_earlier();

    auto fetch = [&](int stage, int from) {
        const int count = min(CHUNK, end - from);
        for (int n = thread; n < count * (64 / PER_COPY); n += 128) {
            const int token = n / (64 / PER_COPY), c = n % (64 / PER_COPY) * PER_COPY;
            const i64 at = (i64)(from + token) * hidden + head * 64 + c;
#pragma unroll
            for (int plane = 0; plane < 5; plane++)
                copy_async<16>(&staged[stage][plane][token][c], planes + plane * tokens * hidden + at);
        }
        for (int n = thread; n < count * 16; n += 128)
            copy_async<16>(&decays[stage][n / 16][n % 16 * 4], decay + (i64)(from + n / 16) * hidden + head * 64 + n % 16 * 4);
        copies_begin();
    };

    fetch(0, start);
    float r[8], k[8], w[8], a[8], b[8], v[ROWS];
    int stage = 0;
    auto take = [&](int token) {
        load8<S>(staged[stage][0][token], lane, r);
        load8<S>(staged[stage][1][token], lane, k);
        load8<S>(staged[stage][3][token], lane, a);
        load8<S>(staged[stage][4][token], lane, b);
        load8<S>(decays[stage][token], lane, w);
#pragma unroll
        for (int i = 0; i < ROWS; i++) v[i] = wide(staged[stage][2][token][first_value + value + 16 * i]);
    };
    for (int from = start; from < end; from += CHUNK, stage ^= 1) {
        if (from + CHUNK < end) {
            fetch(stage ^ 1, from + CHUNK);
            copies_end<1>();
        } else {
            copies_end<0>();
        }
        __syncthreads();
        const int count = min(CHUNK, end - from);
        int token = 0;
        for (; token + 8 <= count; token += 8) {
            float shares[ROWS][8];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                take(token + n);
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    const float removed = over_eight(dot8(s[i], a));
                    shares[i][n] = advance(s[i], removed, r, k, w, b, v[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS; i++) narrow(sums8(shares[i], lane), read_out[token + (lane & 7)][value + 16 * i]);
        }
        for (; token < count; token++) {
            take(token);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float removed = over_eight(dot8(s[i], a));
                const float whole = over_eight(advance(s[i], removed, r, k, w, b, v[i]));
                if ((lane & 7) == 0) narrow(whole, read_out[token][value + 16 * i]);
            }
        }
        __syncthreads();
        for (int n = thread; n < count * (16 * ROWS / 4); n += 128) {
            const int one = n / (4 * ROWS), c = n % (4 * ROWS) * 4;
            typedef typename Four<T>::type four;
            T* to = out + (i64)(from + one) * hidden + head * 64 + first_value + c;
            *reinterpret_cast<four*>(to) = *reinterpret_cast<four*>(&read_out[one][c]);
        }
    }
    launch_dependents();
    u32 keys[8];
    if (DITHER)
#pragma unroll
        for (int j = 0; j < 8; j++) keys[j] = hashed(k[j], j < 4 ? Keys<S>::first(lane) + j : Keys<S>::second(lane) + j - 4);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (DITHER) dither<S>(s[i], hashed(v[i], 64 + first_value + value + 16 * i), keys);
        store8(state + write[row] * slot_stride + place + i * 1024, lane, s[i]);
    }
}
