// Runs one launch of a kernel on a CPU: a fiber for each thread of a block, one block after another.
// The kernel's own file is compiled with -fsanitize=thread, and the functions that this asks for stand here, in
// place of the sanitizer's: each access of the kernel arrives with its address and its place in the code.
//
// emulator ARENA REPORT reversed limit  blocks.x y z  threads.x y z  (p OFFSET BYTES | n NUMBER)...
// ARENA is a file with the tensors; it is changed in place. REPORT gets lines for kernel.py to read.
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <vector>

#include "emulator.h"

extern "C" {
extern char __start_cuda_shared[] __attribute__((weak)), __stop_cuda_shared[] __attribute__((weak));
extern char __executable_start[], __data_start[];
void cuda_kernel(const cuda_argument*);
cuda_place* cuda_now;
}

enum State { READY, BARRIER, WARP, DONE };
struct Thread {
    cuda_place place;
    ucontext_t context;
    char* stack;
    State state;
    unsigned mask, posted, result;
    int from;  // the lane whose value a shuffle gets; -1 at __syncwarp, -2 at a ballot
    void* at;  // where in the code it waits
    std::unordered_map<uint64_t, unsigned> times;
    std::vector<long> moved;  // bytes, by tensor and kind
};
struct Access { unsigned block, thread, epoch, warp_epoch; void* pc; unsigned char mask, atomic; };
struct Cell { Access written, read[4]; };  // of a word of four bytes; block 0 is none
struct Group { uint64_t key; int n; uint64_t at[32]; int bytes[32], lane[32]; };  // a warp's one instruction
struct Count { long accesses, requests, moved, bytes, sectors, passes, needed; };
struct Region { char *from, *to; };

static const size_t STACK = 128 << 10;
static std::vector<Thread> threads;
static std::vector<Region> tensors;
static std::vector<unsigned> warp_epochs;
static std::unordered_map<uint64_t, Group> groups;
static std::unordered_map<uint64_t, Count> counts;  // by place in the code, tensor, kind
static std::set<std::pair<void*, void*>> told;
static Cell *shadow, *shared_shadow;
static char *arena, *shared, *shared_end;
static std::vector<long> most;  // bytes of one thread, by tensor and kind
static size_t arena_bytes;
static ucontext_t scheduler;
static Thread* me;
static unsigned block_number, epoch;
static long steps, limit;
static FILE* report;

static void say(const char* format, ...) {
    va_list values;
    va_start(values, format);
    vfprintf(report, format, values);
    va_end(values);
}

static void stop() {
    fclose(report);
    fflush(stdout);
    _exit(0);
}

static unsigned number(const Thread* t) { return unsigned(t - threads.data()); }

// ---- accesses

static void finish(Group& g) {
    Count& c = counts[g.key];
    c.requests++;
    std::set<uint64_t> sectors, bytes;
    for (int i = 0; i < g.n; i++) {
        c.accesses++, c.moved += g.bytes[i];
        for (int b = 0; b < g.bytes[i]; b++) bytes.insert(g.at[i] + b);
        for (uint64_t s = g.at[i] / 32; s <= (g.at[i] + g.bytes[i] - 1) / 32; s++) sectors.insert(s);
    }
    c.bytes += bytes.size();
    c.sectors += sectors.size();
    if (!(g.key >> 2 & 0x3fff)) {  // shared memory: 128 bytes in one pass at most: accesses of 8 and 16 bytes take turns
        int part = 32 / std::max(1, g.bytes[0] / 4);
        for (int first = 0; first < 32; first += part) {
            std::set<uint64_t> banks[32];
            size_t most = 0;
            for (int i = 0; i < g.n; i++)
                if (g.lane[i] >= first && g.lane[i] < first + part)
                    for (uint64_t w = g.at[i] / 4; w <= (g.at[i] + g.bytes[i] - 1) / 4; w++)
                        banks[w % 32].insert(w), most = std::max(most, banks[w % 32].size());
            c.passes += most, c.needed += most > 0;
        }
    }
}

static bool ordered(const Access& a, const Access& b) {
    if (!a.block || (a.atomic && b.atomic) || !(a.mask & b.mask)) return true;
    if (a.block != b.block) return false;
    return a.thread == b.thread || a.epoch != b.epoch ||
           (a.thread / 32 == b.thread / 32 && a.warp_epoch != b.warp_epoch);
}

static void clash(const char* kinds, const Access& a, const Access& b, char* at) {
    if (told.size() < 50 && told.insert({a.pc, b.pc}).second)
        say("race %s %p %p %u %u %u %u %ld %p\n", kinds, a.pc, b.pc, a.block - 1, a.thread, b.block - 1, b.thread,
            at >= arena && at < arena + arena_bytes ? long(at - arena) : -1L, at);
}

static void watch(void* address, int bytes, bool writes, bool atomic, void* pc) {
    char* at = (char*)address;
    if (at >= me->stack && at < me->stack + STACK) return;
    if (at >= (char*)&cuda_now && at < (char*)(&cuda_now + 1)) return;
    if (at >= (char*)threads.data() && at < (char*)(threads.data() + threads.size())) return;
    bool in_shared = at >= shared && at + bytes <= shared_end;
    int tensor = -1;
    for (size_t i = 0; i < tensors.size() && !in_shared; i++)
        if (at >= tensors[i].from && at + bytes <= tensors[i].to) tensor = int(i);
    if (!in_shared && tensor < 0) {
        if (!writes && at >= __executable_start && at < __data_start) return;  // a constant of the program
        say("outside %d %p %u %u %ld %p %d\n", writes, pc, block_number - 1, number(me), long(at - arena), at, bytes);
        stop();
    }
    if (++steps > limit) say("limit %p\n", pc), stop();
    uint64_t key = uint64_t(pc) << 16 | uint64_t(tensor + 1) << 2 | atomic << 1 | writes;
    unsigned warp = number(me) / 32, time = me->times[key]++;
    me->moved[key & 0xffff] += bytes;
    uint64_t group = key * 0x9e3779b97f4a7c15u ^ (uint64_t(time) << 24 | warp << 16);
    Group& g = groups[group];
    g.key = key;
    g.at[g.n] = uint64_t(at - (in_shared ? shared : arena));
    g.bytes[g.n] = bytes, g.lane[g.n] = number(me) % 32;
    if (++g.n == 32) finish(g), groups.erase(group);
    Access now{block_number, number(me), epoch, warp_epochs[warp], pc, 0, atomic};
    for (char *w = (char*)(uint64_t(at) & ~3ull); w < at + bytes; w += 4) {
        Cell& c = in_shared ? shared_shadow[(w - shared) / 4] : shadow[(w - arena) / 4];
        now.mask = 0;
        for (int b = 0; b < 4; b++) now.mask |= (w + b >= at && w + b < at + bytes) << b;
        if (!ordered(c.written, now)) clash(writes ? "ww" : "wr", c.written, now, w);
        if (writes) {
            for (Access& r : c.read)
                if (!ordered(r, now)) clash("rw", r, now, w);
            c.written = now;
        } else {
            if (in_shared && !c.written.block && told.insert({pc, nullptr}).second)
                say("unwritten %p %u %u %p\n", pc, block_number - 1, number(me), w);
            // The last reader, and one of another thread, of another warp, and of another block: a later writer
            // races with one of these if it races with any.
            Access& r = c.read[0];
            if (r.block != now.block) c.read[3] = r;
            else if (r.epoch == now.epoch && r.thread / 32 != now.thread / 32) c.read[2] = r;
            else if (r.epoch == now.epoch && r.thread != now.thread) c.read[1] = r;
            r = now;
        }
    }
}

extern "C" {
#define HOOK(NAME, BYTES, WRITES) \
    void NAME(void* at) { watch(at, BYTES, WRITES, false, __builtin_return_address(0)); }
#define HOOKS(BYTES)                                                                                         \
    HOOK(__tsan_read##BYTES, BYTES, false) HOOK(__tsan_write##BYTES, BYTES, true)                            \
    HOOK(__tsan_unaligned_read##BYTES, BYTES, false) HOOK(__tsan_unaligned_write##BYTES, BYTES, true)        \
    HOOK(__tsan_volatile_read##BYTES, BYTES, false) HOOK(__tsan_volatile_write##BYTES, BYTES, true)          \
    void __tsan_read_write##BYTES(void* at) {                                                                \
        watch(at, BYTES, false, false, __builtin_return_address(0));                                         \
        watch(at, BYTES, true, false, __builtin_return_address(0));                                          \
    }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void* at, unsigned long n) { watch(at, int(n), false, false, __builtin_return_address(0)); }
void __tsan_write_range(void* at, unsigned long n) { watch(at, int(n), true, false, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void cuda_copy(void* to, const void* from, int bytes) {
    void* pc = __builtin_return_address(0);
    watch((void*)from, bytes, false, false, pc);
    watch(to, bytes, true, false, pc);
    if (uint64_t(to) % bytes || uint64_t(from) % bytes) say("unaligned %p %d\n", pc, bytes), stop();
    memcpy(to, from, bytes);
}
void cuda_atomic(void* at, int bytes) { watch(at, bytes, true, true, __builtin_return_address(0)); }

// ---- threads that wait

static unsigned wait(State state, unsigned mask, unsigned value, int from, void* at) {
    if (++steps > limit) say("limit %p\n", at), stop();
    if (state == WARP && !(mask >> number(me) % 32 & 1)) say("mask %p %u %u\n", at, block_number - 1, number(me)), stop();
    me->state = state, me->mask = mask, me->posted = value, me->from = from, me->at = at;
    swapcontext(&me->context, &scheduler);
    return me->result;
}
void __syncthreads() { wait(BARRIER, 0, 0, 0, __builtin_return_address(0)); }
int __syncthreads_count(int p) { return wait(BARRIER, 0, p != 0, 0, __builtin_return_address(0)); }
void __syncwarp(unsigned mask) { wait(WARP, mask, 0, -1, __builtin_return_address(0)); }
unsigned __ballot_sync(unsigned mask, int p) { return wait(WARP, mask, p != 0, -2, __builtin_return_address(0)); }
unsigned cuda_shuffle(unsigned mask, unsigned value, int from) {
    return wait(WARP, mask, value, from, __builtin_return_address(0));
}
int cuda_lane() { return number(me) % 32; }
}

static const cuda_argument* arguments;

static void body() {
    cuda_kernel(arguments);
    me->state = DONE;
}

static bool release_warp(size_t first) {
    size_t last = std::min(first + 32, threads.size());
    unsigned here = 0, done = 0, yes = 0;
    for (size_t i = first; i < last; i++) {
        here |= unsigned(threads[i].state == WARP) << (i - first);
        done |= unsigned(threads[i].state == DONE) << (i - first);
        yes |= unsigned(threads[i].state == WARP && threads[i].posted) << (i - first);
    }
    unsigned exist = last - first == 32 ? ~0u : (1u << (last - first)) - 1;
    for (size_t i = first; i < last; i++) {
        Thread& t = threads[i];
        if (t.state != WARP || (t.mask & exist & ~done & ~here)) continue;
        unsigned group = t.mask & here;
        bool synced = t.from == -1;
        for (size_t j = first; j < last; j++)
            if (group >> (j - first) & 1) {
                Thread& u = threads[j];
                bool there = u.from >= 0 && (group >> u.from & 1);  // an absent lane's value is undefined
                if (u.from >= 0 && !there && told.insert({u.at, &told}).second)
                    say("absent %p %u %u %d\n", u.at, block_number - 1, number(&u), u.from);
                u.result = u.from == -2 ? yes & group : there ? threads[first + u.from].posted : ~0u;
            }
        for (size_t j = first; j < last; j++)
            if (group >> (j - first) & 1) threads[j].state = READY;
        warp_epochs[first / 32] += synced;
        return true;
    }
    return false;
}

static void run_block(bool reversed) {
    memset(shared, 0xff, shared_end - shared);  // NaN
    memset(shared_shadow, 0, ((shared_end - shared) / 4 + 1) * sizeof(Cell));
    epoch = 0;
    std::fill(warp_epochs.begin(), warp_epochs.end(), 0);
    for (Thread& t : threads) {
        t.state = READY;
        t.times.clear();
        t.moved.assign(most.size(), 0);
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack, t.context.uc_stack.ss_size = STACK, t.context.uc_link = &scheduler;
        makecontext(&t.context, body, 0);
    }
    for (;;) {
        bool ran = false;
        for (size_t i = 0; i < threads.size(); i++) {
            Thread& t = threads[reversed ? threads.size() - 1 - i : i];
            if (t.state != READY) continue;
            me = &t, cuda_now = &t.place, ran = true;
            swapcontext(&scheduler, &t.context);
        }
        for (size_t first = 0; first < threads.size(); first += 32) ran |= release_warp(first);
        if (ran) continue;
        Thread *waits = nullptr, *other = nullptr;
        for (Thread& t : threads)
            if (t.state != DONE && (!waits || t.state == WARP)) waits = &t;
        if (!waits) break;
        for (Thread& t : threads)
            if (waits->state == WARP ? &t != waits && number(&t) / 32 == number(waits) / 32 && t.state != WARP
                                     : t.state == DONE)
                other = other ? other : &t;
        if (other || waits->state == WARP) {
            other = other ? other : waits;
            say("stuck %d %p %u %u %u %d\n", waits->state == WARP, waits->at, block_number - 1, number(waits),
                number(other), other->state == DONE);
            stop();
        }
        epoch++;
        unsigned yes = 0;
        for (Thread& t : threads) {
            yes += t.posted;
            if (t.at != waits->at && told.insert({t.at, waits->at}).second)
                say("apart %p %p %u %u %u\n", waits->at, t.at, block_number - 1, number(waits), number(&t));
        }
        for (Thread& t : threads) t.state = READY, t.result = yes;
    }
    for (Thread& t : threads)
        for (size_t k = 0; k < most.size(); k++) most[k] = std::max(most[k], t.moved[k]);
    for (auto& [_, g] : groups) finish(g);
    groups.clear();
}

int main(int, char** v) {
    struct stat info;
    int file = open(v[1], O_RDWR);
    fstat(file, &info);
    arena_bytes = info.st_size;
    arena = (char*)mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    report = fopen(v[2], "w");
    bool reversed = atoi(v[3]);
    limit = atol(v[4]);
    dim3 blocks(atoi(v[5]), atoi(v[6]), atoi(v[7])), size(atoi(v[8]), atoi(v[9]), atoi(v[10]));
    std::vector<cuda_argument> given;
    for (char** a = v + 11; *a;) {
        cuda_argument one;
        if (**a == 'p') {
            one.pointer = arena + atol(a[1]);
            tensors.push_back({(char*)one.pointer, (char*)one.pointer + atol(a[2])});
            a += 3;
        } else {
            one.number = atof(a[1]);
            tensors.push_back({nullptr, nullptr});
            a += 2;
        }
        given.push_back(one);
    }
    arguments = given.data();
    shared = __start_cuda_shared, shared_end = __stop_cuda_shared;
    shadow = (Cell*)calloc(arena_bytes / 4 + 1, sizeof(Cell));
    shared_shadow = (Cell*)calloc((shared_end - shared) / 4 + 1, sizeof(Cell));
    most.resize(4 * (tensors.size() + 1));
    threads.resize(size.x * size.y * size.z);
    warp_epochs.resize((threads.size() + 31) / 32);
    for (Thread& t : threads) {
        unsigned i = number(&t);
        t.place.thread = {i % size.x, i / size.x % size.y, i / size.x / size.y};
        t.place.threads = size, t.place.blocks = blocks;
        t.stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    unsigned all = blocks.x * blocks.y * blocks.z;
    for (unsigned b = 0; b < all; b++) {
        unsigned i = reversed ? all - 1 - b : b;
        block_number = i + 1;
        for (Thread& t : threads) t.place.block = {i % blocks.x, i / blocks.x % blocks.y, i / blocks.x / blocks.y};
        run_block(reversed);
    }
    for (auto& [key, c] : counts)
        say("count 0x%llx %d %d %ld %ld %ld %ld %ld %ld %ld\n", (unsigned long long)(key >> 16),
            int(key >> 2 & 0x3fff) - 1, int(key & 3), c.accesses, c.requests, c.moved, c.bytes, c.sectors, c.passes,
            c.needed);
    for (size_t k = 0; k < most.size(); k++)
        if (most[k]) say("most %d %d %ld\n", int(k >> 2) - 1, int(k & 3), most[k]);
    stop();
}
