// The driver, cuBLAS and NVRTC as far as the library calls them, on the host: kernels are compiled as C++ (KERNELS is
// their file, TABLE lists their names) and run a thread at a time, so that every index they compute is checked here.
// Threads of a block are fibres that change at barriers.

#undef _FORTIFY_SOURCE
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <utility>
#include <vector>

struct dim { unsigned x, y, z; };
static dim blockIdx, threadIdx, blockDim, gridDim;
static ucontext_t scheduler, fibres[1024];
// A fibre starts by its context and changes by jumps, which ask nothing of the system.
static jmp_buf home, places[1024];
static char* stacks[1024];
static bool done[1024], started[1024];
static unsigned current;
static int votes[1024];
static void (*running)(void**);
static void** given;

static void change() { if (!_setjmp(places[current])) _longjmp(home, 1); }
static void __syncthreads() { change(); }
static unsigned __ballot_sync(unsigned, int vote) {
    votes[current] = vote;
    change();
    unsigned mask = 0;
    for (unsigned lane = 0; lane < 32 && current / 32 * 32 + lane < blockDim.x; lane++)
        mask |= (unsigned)(votes[current / 32 * 32 + lane] != 0) << lane;
    change();
    return mask;
}
static double __dmul_rn(double a, double b) { return a * b; }
static int __popc(unsigned v) { return __builtin_popcount(v); }

#define __global__
#define __device__ static
#define __shared__ static
#define __forceinline__ inline
using std::isinf;
using std::isnan;
#include KERNELS

template <class... A, size_t... I>
static void unpack(void (*f)(A...), void** a, std::index_sequence<I...>) { f(*(A*)a[I]...); }
template <class... A> static void call(void (*f)(A...), void** a) { unpack(f, a, std::index_sequence_for<A...>{}); }
struct entry { const char* name; bool has_barriers; void (*run)(void**); };
static const entry table[] = {
#define KERNEL(name) {#name, true, [](void** a) { call(name, a); }},
#define PLAIN_KERNEL(name) {#name, false, [](void** a) { call(name, a); }},
#include TABLE
};

static void fibre() { running(given); done[current] = true; _longjmp(home, 1); }

#define API extern "C" __attribute__((visibility("default"))) int
static size_t held = 0, limit = (size_t)2 << 30;
struct block { char* at; size_t bytes; };
static std::vector<block> blocks;
static const size_t GUARD = 64;

// Every access of the driver's is inside one block, and nothing has written behind its end.
static bool inside(uint64_t at, size_t bytes) {
    for (auto& b : blocks)
        if ((char*)at >= b.at && (char*)at + bytes <= b.at + b.bytes) return true;
    fprintf(stderr, "emulated device: %zu bytes at a place that nobody was given\n", bytes);
    return false;
}
static void check_guards(const char* name) {
    for (auto& b : blocks)
        for (size_t i = 0; i < GUARD; i++)
            if (b.at[b.bytes + i] != 0x5a) { fprintf(stderr, "emulated device: %s wrote behind a buffer\n", name); abort(); }
}

API cuInit(unsigned) { return 0; }
API cuDriverGetVersion(int* v) { *v = 12040; return 0; }
API cuDeviceGetCount(int* n) { *n = 1; return 0; }
API cuDeviceGet(int* d, int n) { *d = n; return 0; }
API cuDeviceGetName(char* name, int n, int) { snprintf(name, n, "emulated"); return 0; }
API cuDeviceGetAttribute(int* v, int, int) { *v = 9; return 0; }
API cuDevicePrimaryCtxRetain(void** c, int) { *c = &held; return 0; }
API cuCtxSetCurrent(void*) { return 0; }
API cuCtxSynchronize() { return 0; }
API cuMemGetInfo_v2(size_t* f, size_t* t) { *f = limit - held; *t = limit; return 0; }
API cuMemAlloc_v2(uint64_t* at, size_t n) {
    if (held + n > limit) return 2;
    char* p = (char*)malloc(n + GUARD);
    memset(p, 0x7f, n);
    memset(p + n, 0x5a, GUARD);
    blocks.push_back({p, n});
    held += n;
    *at = (uint64_t)p;
    return 0;
}
API cuMemFree_v2(uint64_t at) {
    for (size_t i = 0; i < blocks.size(); i++)
        if (blocks[i].at == (char*)at) { held -= blocks[i].bytes; free(blocks[i].at); blocks.erase(blocks.begin() + i); return 0; }
    return 1;
}
API cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t n) { if (!inside(to, n)) return 1; memcpy((void*)to, from, n); return 0; }
API cuMemcpyDtoH_v2(void* to, uint64_t from, size_t n) { if (!inside(from, n)) return 1; memcpy(to, (void*)from, n); return 0; }
API cuMemsetD8_v2(uint64_t at, unsigned char v, size_t n) { if (!inside(at, n)) return 1; memset((void*)at, v, n); return 0; }
API cuModuleLoadData(void** m, const void*) { *m = (void*)table; return 0; }
API cuModuleGetFunction(void** f, void*, const char* name) {
    for (auto& e : table) if (!strcmp(e.name, name)) { *f = (void*)&e; return 0; }
    return 500;
}
API cuGetErrorName(int, const char** name) { *name = "EMULATED_ERROR"; return 0; }
API cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, void*, void** args, void**) {
    const entry* e = (const entry*)f;
    if (gy > 65535 || bx > 1024 || gz != 1 || by != 1 || bz != 1) return 1;
    running = e->run;
    given = args;
    gridDim = {gx, gy, 1};
    blockDim = {bx, 1, 1};
    for (unsigned y = 0; y < gy; y++)
        for (unsigned x = 0; x < gx; x++) {
            blockIdx = {x, y, 0};
            if (!e->has_barriers) {
                for (unsigned t = 0; t < bx; t++) {
                    threadIdx = {t, 0, 0};
                    e->run(args);
                }
                continue;
            }
            for (unsigned t = 0; t < bx; t++) {
                if (!stacks[t]) stacks[t] = (char*)malloc(65536);
                getcontext(&fibres[t]);
                fibres[t].uc_stack.ss_sp = stacks[t];
                fibres[t].uc_stack.ss_size = 65536;
                fibres[t].uc_link = &scheduler;
                makecontext(&fibres[t], fibre, 0);
                done[t] = started[t] = false;
            }
            for (bool left = true; left;) {
                left = false;
                for (unsigned t = 0; t < bx; t++)
                    if (!done[t]) {
                        current = t;
                        threadIdx = {t, 0, 0};
                        if (!_setjmp(home)) {
                            if (started[t]) _longjmp(places[t], 1);
                            started[t] = true;
                            setcontext(&fibres[t]);
                        }
                        left |= !done[current];
                    }
            }
        }
    check_guards(e->name);
    return 0;
}

API cublasCreate_v2(void** h) { *h = &held; return 0; }
API cublasSetMathMode(void*, int) { return 0; }
template <class T>
static int product(int ta, int tb, int m, int n, int k, T alpha, const T* a, int lda, const T* b, int ldb, T beta, T* c, int ldc) {
    if (lda < (ta ? k : m) || ldb < (tb ? n : k) || ldc < m) return 7;
    for (int j = 0; j < n; j++)
        for (int i = 0; i < m; i++) {
            double sum = 0;
            for (int l = 0; l < k; l++)
                sum += (double)(ta ? a[(size_t)i * lda + l] : a[(size_t)l * lda + i]) * (tb ? b[(size_t)l * ldb + j] : b[(size_t)j * ldb + l]);
            T& out = c[(size_t)j * ldc + i];
            out = alpha * (T)sum + (beta == 0 ? 0 : beta * out);
        }
    check_guards("a product");
    return 0;
}
API cublasSgemm_v2(void*, int ta, int tb, int m, int n, int k, const float* al, uint64_t a, int lda, uint64_t b, int ldb, const float* be, uint64_t c, int ldc) {
    return product(ta, tb, m, n, k, *al, (float*)a, lda, (float*)b, ldb, *be, (float*)c, ldc);
}
API cublasDgemm_v2(void*, int ta, int tb, int m, int n, int k, const double* al, uint64_t a, int lda, uint64_t b, int ldb, const double* be, uint64_t c, int ldc) {
    return product(ta, tb, m, n, k, *al, (double*)a, lda, (double*)b, ldb, *be, (double*)c, ldc);
}
API cublasDsyrk_v2(void*, int, int t, int n, int k, const double* al, uint64_t a, int lda, const double* be, uint64_t c, int ldc) {
    std::vector<double> full((size_t)n * n, 0.0);
    int status = product(t, !t, n, n, k, *al, (double*)a, lda, (double*)a, lda, 0.0, full.data(), n);
    if (status) return status;
    for (int j = 0; j < n; j++)
        for (int i = j; i < n; i++) {
            double& out = ((double*)c)[(size_t)j * ldc + i];
            out = full[(size_t)j * n + i] + (*be == 0 ? 0 : *be * out);
        }
    return 0;
}
API cublasDgemmStridedBatched(void*, int ta, int tb, int m, int n, int k, const double* al, uint64_t a, int lda, long sa, uint64_t b, int ldb, long sb, const double* be, uint64_t c, int ldc, long sc, int batch) {
    for (int i = 0; i < batch; i++)
        if (int s = product(ta, tb, m, n, k, *al, (double*)a + i * sa, lda, (double*)b + i * sb, ldb, *be, (double*)c + i * sc, ldc)) return s;
    return 0;
}

API nvrtcVersion(int* a, int* b) { *a = 12; *b = 4; return 0; }
API nvrtcCreateProgram(void** p, const char*, const char*, int, const char* const*, const char* const*) { *p = &held; return 0; }
API nvrtcDestroyProgram(void**) { return 0; }
API nvrtcCompileProgram(void*, int, const char* const*) { return 0; }
API nvrtcGetProgramLogSize(void*, size_t* n) { *n = 1; return 0; }
API nvrtcGetProgramLog(void*, char* log) { *log = 0; return 0; }
API nvrtcGetCUBINSize(void*, size_t* n) { *n = 1; return 0; }
API nvrtcGetCUBIN(void*, char* code) { *code = 0; return 0; }
