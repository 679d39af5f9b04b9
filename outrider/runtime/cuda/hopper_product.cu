// Products of many rows on Hopper: out[part, m, n] = x[m] . weight[n] over a part of the inputs, in float32; or, GATED, SiLU of
// one product times another: out[m, n] = silu(x[m] . first[n]) * (x[m] . second[n]); or, WHOLE, the product itself, rounded.
//
// A block has 128 rows and, at a time, a tile of WEIGHTS weights (GATED: half of them of each matrix) and a part of the
// inputs. One thread asks the copy engine for slices of the weights, another for slices of the rows; both lie in shared memory
// in rings. Two groups of 128 threads multiply, 64 rows each. Of more than 128 rows two blocks have a half each and make up a
// cluster: each fetches half of the weights, and the copy engine gives them to both.
// Defined in front of this: GATED, WHOLE, CLUSTER, STAGES, DEPTH (of the ring of weights), WEIGHTS, and what depends on the kind of
// number: multiply (64 rows by WEIGHTS), pair and times (two numbers at once), rounded.

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) Map { u64 opaque[16]; };  // CUtensorMap

constexpr u32 SLICE = 64;  // inputs looked at together: 128 bytes of a row, which the copy engine interleaves in eights
constexpr u32 ROWS = 128, GROUPS = 2, SUMS = WEIGHTS / 2;  // each thread has one of 128 shares of 64 x WEIGHTS
constexpr u32 ROW_BYTES = ROWS * SLICE * 2, WEIGHT_BYTES = WEIGHTS * SLICE * 2;
constexpr u32 OUTPUTS = GATED ? WEIGHTS / 2 : WEIGHTS;  // of a tile
constexpr unsigned short ALL = (1 << CLUSTER) - 1;

__device__ __forceinline__ void arm(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}

__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra END;\nbra AGAIN;\nEND:\n}" ::"r"(bar), "r"(parity) : "memory");
}

// Nothing was written that others would read, so this needs no release to the cluster, which would cost a microsecond.
__device__ __forceinline__ void arrive(u32 bar, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(block) : "memory");
}

__device__ __forceinline__ void fetch(u32 to, const Map& map, u32 k, u32 row, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(k), "r"(row), "r"(bar) : "memory");
}

__device__ __forceinline__ void fetch_for_all(u32 to, const Map& map, u32 k, u32 row, u32 bar) {
    if (CLUSTER == 1) return fetch(to, map, k, row, bar);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(to), "l"(&map), "r"(k), "r"(row), "r"(bar), "h"(ALL) : "memory");
}

__device__ __forceinline__ u64 described(u32 at) {  // rows of 128 bytes, interleaved in eights
    return ((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void meet() {  // all threads of the cluster
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float silu(float x) {  // by the instructions that Triton makes of it, to the same bits
    float power, quotient;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(1.0f + power));
    return quotient;
}

// A thread's sums of one row: of every 8 weights two neighbours, the j-th eight's at sums[4 * j]; `column` is the first.
__device__ __forceinline__ void write_gated(const float* sums, u32* out, u32 column, u32 width) {
#pragma unroll
    for (u32 j = 0; j < OUTPUTS / 8; j++) {
        const float *one = sums + 4 * j, *other = one + SUMS / 2;  // the second product's lie half the sums further on
        const u32 by = pair(silu(rounded(one[0])), silu(rounded(one[1])));
        if (column + 8 * j < width) out[(column + 8 * j) / 2] = times(by, pair(other[0], other[1]));
    }
}

__device__ __forceinline__ void write_whole(const float* sums, u32* out, u32 column, u32 width) {
#pragma unroll
    for (u32 j = 0; j < OUTPUTS / 8; j++)
        if (column + 8 * j < width) out[(column + 8 * j) / 2] = pair(sums[4 * j], sums[4 * j + 1]);
}

// Neighbouring threads exchange two of each pair of eights, after which either has 16 bytes of one of them.
__device__ __forceinline__ void write_part(const float* sums, float* out, u32 column, u32 width, bool there) {
    const bool odd = column / 2 % 2;
    const u32 at = odd ? column - 2 + 8 : column;
#pragma unroll
    for (u32 j = 0; j < OUTPUTS / 8; j += 2) {
        const float *one = sums + 4 * j, *other = one + 4;
        const float2 kept = odd ? make_float2(other[0], other[1]) : make_float2(one[0], one[1]);
        const float2 given = odd ? make_float2(one[0], one[1]) : make_float2(other[0], other[1]);
        const float2 got = make_float2(__shfl_xor_sync(~0u, given.x, 1), __shfl_xor_sync(~0u, given.y, 1));
        const float2 low = odd ? got : kept, high = odd ? kept : got;
        if (there && at + 8 * j < width) *(float4*)(out + at + 8 * j) = make_float4(low.x, low.y, high.x, high.y);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) product(
    const __grid_constant__ Map x, const __grid_constant__ Map first, const __grid_constant__ Map second, void* out, u32 rows,
    u32 apart, u32 width, u32 tiles, u32 parts, u32 steps) {  // apart: rows from one part to the next
    extern __shared__ unsigned char room[];
    const u32 ring = ((u32)__cvta_generic_to_shared(room) + 1023) & ~1023u, weights = ring + STAGES * ROW_BYTES;
    const u32 full = weights + DEPTH * WEIGHT_BYTES, empty = full + 8 * STAGES;
    const u32 weights_full = empty + 8 * STAGES, weights_empty = weights_full + 8 * DEPTH;
    const u32 thread = threadIdx.x, begin = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    const u32 turns = tiles * parts;
    if (thread == 0) {
        for (u32 s = 0; s < STAGES; s++) arm(full + 8 * s, 1), arm(empty + 8 * s, GROUPS);
        for (u32 s = 0; s < DEPTH; s++) arm(weights_full + 8 * s, 1), arm(weights_empty + 8 * s, CLUSTER * GROUPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    meet();

    if (thread == 0) {
        u32 stage = 0, parity = 1;
        for (u32 turn = begin; turn < turns; turn += stride)
            for (u32 step = 0; step < steps; step++) {
                const u32 to = weights + stage * WEIGHT_BYTES, bar = weights_full + 8 * stage;
                const u32 k = (turn / tiles * steps + step) * SLICE, row = turn % tiles * OUTPUTS;
                wait(weights_empty + 8 * stage, parity);
                expect(bar, WEIGHT_BYTES);
                if (rank == 0) fetch_for_all(to, first, k, row, bar);
                if (rank == CLUSTER - 1) fetch_for_all(to + WEIGHT_BYTES / 2, second, k, GATED ? row : row + WEIGHTS / 2, bar);
                if (++stage == DEPTH) stage = 0, parity ^= 1;
            }
    } else if (thread == 32) {
        u32 stage = 0, parity = 1;
        asm volatile("griddepcontrol.wait;" ::: "memory");  // the launch before has written the rows
        for (u32 turn = begin; turn < turns; turn += stride)
            for (u32 step = 0; step < steps; step++) {
                wait(empty + 8 * stage, parity);
                expect(full + 8 * stage, ROW_BYTES);
                fetch(ring + stage * ROW_BYTES, x, (turn / tiles * steps + step) * SLICE, rank * ROWS, full + 8 * stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
    } else if (thread >= 128) {
        const u32 group = thread / 128 - 1, mine = thread % 128;
        u32 stage = 0, parity = 0, depth = 0, weights_parity = 0, used = 0, weights_used = 0;
        for (u32 turn = begin; turn < turns; turn += stride) {
            float sums[SUMS];
#pragma unroll
            for (u32 i = 0; i < SUMS; i++) sums[i] = 0.0f;
            auto give_back = [&] {
                if (mine < CLUSTER) arrive(weights_empty + 8 * weights_used, mine);
                if (mine == CLUSTER) arrive(empty + 8 * used, rank);
            };
            for (u32 step = 0; step < steps; step++) {
                wait(weights_full + 8 * depth, weights_parity);
                wait(full + 8 * stage, parity);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                const u64 a = described(ring + stage * ROW_BYTES + group * (ROW_BYTES / GROUPS));
                const u64 b = described(weights + depth * WEIGHT_BYTES);
#pragma unroll
                for (u32 k = 0; k < SLICE / 16; k++) multiply(sums, a + 2 * k, b + 2 * k);
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step > 0) give_back();  // what the slice before has used
                used = stage, weights_used = depth;
                if (++stage == STAGES) stage = 0, parity ^= 1;
                if (++depth == DEPTH) depth = 0, weights_parity ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (u32 i = 0; i < SUMS; i++) asm volatile("" : "+f"(sums[i])::"memory");  // no use of them moves ahead of this
            give_back();
            if (turn + stride >= turns) asm volatile("griddepcontrol.launch_dependents;");
            const u32 column = turn % tiles * OUTPUTS + mine % 4 * 2;
#pragma unroll
            for (u32 lower = 0; lower < 2; lower++) {
                const u32 row = rank * ROWS + group * 64 + mine / 32 * 16 + lower * 8 + mine % 32 / 4;
                const u64 to = ((u64)(turn / tiles) * apart + row) * width;
                if (!GATED && !WHOLE) write_part(sums + 2 * lower, (float*)out + to, column, width, row < rows);
                else if (row < rows && GATED) write_gated(sums + 2 * lower, (u32*)out + to / 2, column, width);
                else if (row < rows) write_whole(sums + 2 * lower, (u32*)out + to / 2, column, width);
            }
        }
    }
    __syncthreads();
    meet();  // nobody leaves while another block still tells it what has been read
}
