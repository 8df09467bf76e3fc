"Answers to the exercises of cuda: the course's, right ones of another style, and wrong ones."

import math

from course_lib.cuda import solutions

REFERENCE = {n: tuple(getattr(solutions, name) for name in names) for n, names in solutions.EXERCISES.items()}
REFERENCE = {n: answers if len(answers) > 1 else answers[0] for n, answers in REFERENCE.items()}


def source(text):
    "An answer that returns this text."
    return lambda: text


def changed(number, *pairs):
    "The answer to an exercise with each (old, new) text of its source replaced wherever it stands."
    text = REFERENCE[number]()
    for old, new in pairs:
        assert old in text, f"{old!r} is not in the answer to {number}"
        text = text.replace(old, new)
    return source(text)


CHUNKS = """
extern "C" __global__ void saxpy(int n, float a, const float* x, float* y) {
    int all = gridDim.x * blockDim.x, each = (n + all - 1) / all, me = blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = me * each; i < min(n, (me + 1) * each); i++) y[i] += a * x[i];
}
"""
WHILE = """
__device__ void one(float a, const float* x, float* y) { *y = fmaf(a, *x, *y); }
extern "C" __global__ void __launch_bounds__(1024)
saxpy(const int count, const float by, const float* __restrict__ u, float* v) {
    unsigned i = threadIdx.x + blockDim.x * blockIdx.x;
    while (i < count) {
        one(by, u + i, v + i);
        i += blockDim.x * gridDim.x;
    }
}
"""
LAST_FIRST = """
extern "C" __global__ void saxpy(int n, float a, const float* x, float* y) {
    long long all = (long long)gridDim.x * blockDim.x, me = blockIdx.x * blockDim.x + threadIdx.x;
    for (long long i = n - 1 - me; i >= 0; i -= all) y[i] += a * x[i];
}
"""
STORED, READ = "tile[threadIdx.y + j][threadIdx.x]", "tile[threadIdx.x][threadIdx.y + j]"
SWIZZLE = [("[32][33]", "[32][32]"), (STORED, "tile[threadIdx.y + j][threadIdx.x ^ (threadIdx.y + j)]"),
           (READ, "tile[threadIdx.x][(threadIdx.y + j) ^ threadIdx.x]")]  # fmt: skip
FLAT = [("tile[32][33]", "tile[32 * 33]"), (STORED, "tile[threadIdx.x * 33 + threadIdx.y + j]"),
        (READ, "tile[(threadIdx.y + j) * 33 + threadIdx.x]")]  # fmt: skip
STRAIGHT = """
extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
    int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
    for (int j = 0; j < 32; j += 8)
        if (row + j < rows && column < columns) y[column * rows + row + j] = x[(row + j) * columns + column];
}
"""
TWO_BUFFERS = """
extern "C" __global__ void scan(const float* x, float* out, int n) {
    __shared__ float part[2][1024];
    int t = threadIdx.x, from = 0;
    part[0][t] = t < n ? x[blockIdx.x * n + t] : 0.0f;
    __syncthreads();
    for (int d = 1; d < blockDim.x; d *= 2) {
        part[1 - from][t] = part[from][t] + (t >= d ? part[from][t - d] : 0.0f);
        from = 1 - from;
        __syncthreads();
    }
    if (t < n) out[blockIdx.x * n + t] = part[from][t];
}
"""
SHUFFLES = """
extern "C" __global__ void scan(const float* x, float* out, int n) {
    __shared__ float sums[32];
    int t = threadIdx.x, lane = t % 32;
    float s = t < n ? x[blockIdx.x * n + t] : 0.0f;
    for (int d = 1; d < 32; d *= 2) {
        float left = __shfl_up_sync(0xffffffff, s, d);
        if (lane >= d) s += left;
    }
    if (lane == 31) sums[t / 32] = s;
    __syncthreads();
    for (int w = 0; w < t / 32; w++) s += sums[w];
    if (t < n) out[blockIdx.x * n + t] = s;
}
"""
TREE = """
extern "C" __global__ void total(const float* x, float* out, int n) {
    __shared__ float part[1024];
    int t = threadIdx.x;
    float s = 0.0f;
    for (int i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x) s += x[i];
    part[t] = s;
    __syncthreads();
    for (int left = blockDim.x; left > 1; left = (left + 1) / 2) {
        if (t < left / 2) part[t] += part[t + (left + 1) / 2];
        __syncthreads();
    }
    if (t == 0) atomicAdd(&out[0], part[0]);
}
"""
BUTTERFLY = """
__device__ float over_warp(float s) {
    for (int d = 1; d < 32; d *= 2) s += __shfl_xor_sync(0xffffffffu, s, d);
    return s;
}
extern "C" __global__ void total(const float* x, float* out, int n) {
    __shared__ float all;
    if (threadIdx.x == 0) all = 0.0f;
    __syncthreads();
    float s = 0.0f;
    for (int i = threadIdx.x + blockIdx.x * blockDim.x; i < n; i += blockDim.x * gridDim.x) s += __ldg(x + i);
    s = over_warp(s);
    if ((threadIdx.x & 31) == 0) atomicAdd(&all, s);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(out, all);
}
"""
PAIRS = """
extern "C" __global__ void saxpy(int n, float a, const float* x, float* y) {
    if (threadIdx.x % 2) return;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        for (int j = i; j < min(n, i + 2); j++) y[j] += a * x[j];
}
"""
ONE_OF_ALL = """
extern "C" __global__ void saxpy(int n, float a, const float* x, float* y) {
    if (blockIdx.x + threadIdx.x == 0)
        for (int i = 0; i < n; i++) y[i] += a * x[i];
}
"""
ONE_THREAD = """
extern "C" __global__ void transpose(const float* x, float* y, int rows, int columns) {
    if (threadIdx.x + threadIdx.y > 0) return;
    int row = blockIdx.y * 32, column = blockIdx.x * 32;
    for (int r = row; r < min(rows, row + 32); r++)
        for (int c = column; c < min(columns, column + 32); c++) y[c * rows + r] = x[r * columns + c];
}
"""
SERIAL = """
extern "C" __global__ void scan(const float* x, float* out, int n) {
    float s = 0.0f;
    for (int i = 0; i < n && threadIdx.x == 0; i++) out[blockIdx.x * n + i] = s += x[blockIdx.x * n + i];
}
"""
TWO_TILES = """
extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
    __shared__ float as[2][16][16], bs[2][16][16];
    int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * 16 + ty, col = blockIdx.x * 16 + tx, now = 0;
    float sum = 0.0f;
    as[0][ty][tx] = row < m && tx < k ? a[row * k + tx] : 0.0f;
    bs[0][ty][tx] = col < n && ty < k ? b[ty * n + col] : 0.0f;
    __syncthreads();
    for (int next = 16; next < k + 16; next += 16) {
        if (next < k) {
            as[1 - now][ty][tx] = row < m && next + tx < k ? a[row * k + next + tx] : 0.0f;
            bs[1 - now][ty][tx] = next + ty < k && col < n ? b[(next + ty) * n + col] : 0.0f;
        }
        for (int i = 0; i < 16; i++) sum += as[now][ty][i] * bs[now][i][tx];
        now = 1 - now;
        __syncthreads();
    }
    if (row < m && col < n) c[row * n + col] = sum;
}
"""
ROW_BY_ONE = """if (tx == 0)  // the first lane of a row loads all of it
            for (int q = 0; q < TILE; q++)
                as[ty][q] = row < m && start + q < k ? a[row * k + start + q] : 0.0f;"""
LOAD_A = "row < m && start + tx < k ? a[row * k + start + tx] : 0.0f"
STRIDE = "blockIdx.x * blockDim.x + threadIdx.x"
BARRIER = "        __syncthreads();\n"


def blocks_by_loop(threads, registers, shared):
    warps, blocks = math.ceil(threads / 32), 0
    unit = math.ceil(registers / 8) * 256
    while True:
        n = blocks + 1
        memory = n * math.ceil((shared + 1024) / 128) * 128
        if n > 32 or n * warps > 64 or n * warps > 4 * (2**14 // unit) or memory > 228 * 1024:
            return blocks
        blocks = n


def blocks_with(threads, registers, shared, *, unit=256, part=True, extra=1024, most=32, up=True):
    "The rule with one part of it changed."
    warps = -(-threads // 32) if up else max(1, threads // 32)
    each = -(-registers * 32 // unit) * unit
    by_registers = 16_384 // each * 4 // warps if part else 65_536 // (each * warps)
    return min(most, 64 // warps, by_registers, 233_472 // max(1, -(-(shared + extra) // 128) * 128))


def rule(**kw):
    return lambda threads, registers, shared: blocks_with(threads, registers, shared, **kw)


blocks, warps = REFERENCE["cuda.6"]

RIGHT = {
    "cuda.1": [source(WHILE), source(LAST_FIRST)],
    "cuda.2": [changed("cuda.2", *SWIZZLE), changed("cuda.2", *FLAT)],
    "cuda.3": [source(TWO_BUFFERS), source(SHUFFLES)],
    "cuda.4": [source(TREE), source(BUTTERFLY)],
    "cuda.5": [
        changed("cuda.5", ("as[TILE][TILE], bs[TILE][TILE]", "tiles[2][TILE][TILE]"), (" as[", " tiles[0]["),
                ("bs[", "tiles[1][")),
        source(TWO_TILES),
        changed("cuda.5", ("float sum = 0.0f;", "double sum = 0.0;"), ("sum += as", "sum += (double)as")),
    ],
    "cuda.6": [
        (blocks_by_loop, lambda t, rate, n, width, loads: -(-t * rate // (n * 32 * width * loads))),
        (blocks, lambda t, rate, n, width, loads: float(math.ceil(t * rate / n / (32 * width * loads)))),
    ],
}  # fmt: skip

MUTANTS = {
    "cuda.1": [
        changed("cuda.1", ("i += step", "i += n")),  # one element a thread
        changed("cuda.1", ("i < n", "i <= n")),
        source(CHUNKS),  # each thread takes neighbouring elements: not coalesced
        changed("cuda.1", ("gridDim.x * blockDim.x", "blockDim.x")),  # a block's elements many times
        changed("cuda.1", ("y[i] = a * x[i] + y[i]", "{ y[i] += a * x[i]; y[i] -= 0.0f * y[0]; }")),
        changed("cuda.1", ("step = gridDim.x * blockDim.x", "step = gridDim.x * 256")),
        source(PAIRS),  # every other lane takes two elements
        source(ONE_OF_ALL),
        changed("cuda.1", ("int step", "if (n == 0 && threadIdx.x == 0) y[0] = 0; int step")),
    ],
    "cuda.2": [
        source(STRAIGHT),
        changed("cuda.2", ("[32][33]", "[32][32]")),
        changed("cuda.2", ("    __syncthreads();\n", "")),
        changed("cuda.2", ("row + j < columns && column < rows", "row + j < rows && column < columns")),
        changed("cuda.2", ("y[(row + j) * rows + column]", "y[(row + j) * columns + column]")),
        source(ONE_THREAD),
        changed("cuda.2", ("[32][33]", "[32][40]")),  # two rows of five begin in one bank
    ],
    "cuda.3": [
        changed("cuda.3", ("0.0f;\n    __syncthreads();\n    for", "0.0f;\n    for")),
        changed("cuda.3", (BARRIER + "        part[t] += left;", "        part[t] += left;")),
        changed("cuda.3", ("part[t] += left;\n" + BARRIER, "part[t] += left;\n")),
        changed("cuda.3", (BARRIER, "        if (t >= d) __syncthreads();\n")),
        changed("cuda.3", ("d < blockDim.x", "d < blockDim.x / 2")),
        changed("cuda.3", ("__syncthreads", "__syncwarp")),  # one warp only
        source(SERIAL),
        changed("cuda.3", ("__shared__ float part", "__shared__ int part"), ("float left", "int left")),
        changed("cuda.3", ("d < blockDim.x", "d < (blockDim.x & ~31u)")),  # small blocks
        changed("cuda.3", ("left;\n", "left;\n        if (t < d) __syncthreads();\n        else\n")),
    ],
    "cuda.4": [
        changed("cuda.4", ("    for (int i = n / 4 * 4 + start; i < n; i += step) s += x[i];\n", "")),
        changed("cuda.4", ("    __syncthreads();\n", "")),
        changed("cuda.4", ("if (threadIdx.x == 0) atomicAdd(out, s)", "atomicAdd(out, threadIdx.x ? 0 : s)")),
        changed("cuda.4", ("atomicAdd(out, s)", "out[0] += s")),
        changed("cuda.4", ("threadIdx.x < blockDim.x / 32 ?", "threadIdx.x < 8 ?")),  # blocks of 256 threads
        changed("cuda.4", ("v = wide[i];", "v(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);")),
        changed("cuda.4", ("int d = 16", "int d = 8")),
        changed("cuda.4", ("x * blockDim.x, start", "x, start"), (STRIDE, "threadIdx.x ? n : blockIdx.x")),
    ],
    "cuda.5": [
        changed("cuda.5", (BARRIER + "    }", "    }")),
        changed("cuda.5", (LOAD_A, "a[min(row, m - 1) * k + min(start + tx, k - 1)]")),  # no zeros
        changed("cuda.5", ("float sum = 0.0f;", "float sum = 0.0f; if (row >= m || column >= n) return;")),
        changed("cuda.5", ("as[ty][tx] = " + LOAD_A, "as[tx][ty] = row < m && start + ty < k ? 0.0f : 0.0f")),
        changed("cuda.5", ("sum += as[ty][i]", "if (row < m & start + i < k) sum += a[k * row + start + i]")),
        changed("cuda.5", ("start < k;", "start + TILE <= k;")),
        changed("cuda.5", ("b[(start + ty) * n", "b[(start + ty) * k")),
        source(TWO_TILES.replace(" && tx < k", "").replace(" && ty < k", "", 1)),  # k under 16
        changed("cuda.5", ("as[ty][tx] = " + LOAD_A + ";", ROW_BY_ONE)),
    ],
    "cuda.6": [
        (rule(part=False), warps),
        (rule(up=False), warps),
        (rule(extra=0), warps),
        (rule(unit=1), warps),
        (rule(most=16), warps),
        (blocks, lambda t, rate, n, width, loads: math.floor(t * rate / n / (32 * width * loads)) + 1),
        (blocks, lambda *a: warps(*a) + 1),
        (blocks, lambda t, rate, n, width, loads: round(t * rate / n / (32 * width * loads) + 0.5)),
        (blocks, lambda t, rate, n, width, loads: math.ceil(t * rate / n / (width * loads))),
        (blocks, lambda t, rate, n, width, loads: math.floor(t * rate / n / (32 * width * loads))),
    ],
}  # fmt: skip
