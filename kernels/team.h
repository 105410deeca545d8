// A team of threads. The caller of a region and each worker that comes in meanwhile call the same
// function, which takes its work from a counter. At its end the caller closes the door and waits
// for those who are inside: never for a thread that has not come, because another program has its
// core. (OpenMP waits for all, 200 times in a token.) Who does what changes no result.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#ifdef ONE_THREAD  // build.py: the compiler knows no others
#define THREADS ", one thread"
struct Team {
  template <class F> void run(int, const F &f) { f(); }
};
static Team team;
#else
#define THREADS ""
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

static int usable_cores() {
#ifdef __linux__
  cpu_set_t cores;
  if (!sched_getaffinity(0, sizeof cores, &cores)) return CPU_COUNT(&cores);
#endif
  return std::thread::hardware_concurrency();
}

struct Team {
  using Clock = std::chrono::steady_clock;
  using Call = void (*)(const void *);
  static constexpr std::chrono::microseconds SPIN{50}, SHORTEST{1000}, LONGEST{64000};
  static constexpr size_t STACK = 128 << 10;

  // How many workers are inside, may still come in (the door is open while there are seats), and
  // sleep. All in one word: nobody falls asleep beside an open door, or is forgotten there.
  static constexpr uint64_t INSIDE = 1, SEAT = 1 << 20, SLEEPER = 1ull << 40,
                            SEATS = SLEEPER - SEAT;
  alignas(64) std::atomic<uint64_t> gate{0};
  alignas(64) Call call = nullptr;  // of this region, with its
  const void *function = nullptr;
  std::atomic<bool> failed{false};
  std::exception_ptr error;       // the first
  std::atomic<bool> busy{false};  // with the region of a caller

  std::mutex bed;
  std::condition_variable alarm;
  int calls = 0;                    // for sleepers, each of which answers one
  uint64_t workers = 0, limit;      // those that there are; those that there may be
  Clock::time_point alone_until{};  // see learn()
  Clock::duration pause{0};

  static void rest() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }
  void attempt() {
    try {
      call(function);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
      gate.fetch_and(~SEATS, std::memory_order_relaxed);
    }
  }
  void sleep() {
    std::unique_lock<std::mutex> lock(bed);
    uint64_t g = gate.load(std::memory_order_relaxed);
    do
      if (g & SEATS) return;
    while (!gate.compare_exchange_weak(g, g + SLEEPER, std::memory_order_relaxed));
    alarm.wait(lock, [this] { return calls > 0; });
    calls--;
  }
  void work() {
    auto until = Clock::now() + SPIN;
    for (int i = 0;;) {
      uint64_t g = gate.load(std::memory_order_relaxed);
      if (g & SEATS) {
        if (!gate.compare_exchange_weak(g, g - SEAT + INSIDE, std::memory_order_acquire)) continue;
        attempt();
        gate.fetch_sub(INSIDE, std::memory_order_release);
      } else if (++i % 32) {
        rest();
        continue;
      } else if (Clock::now() < until) {
        sched_yield();  // better here than in the midst of a region
        continue;
      } else {
        sleep();
      }
      until = Clock::now() + SPIN;
    }
  }
  // Up to so many workers; fewer if no more threads can be started
  void hire(uint64_t wanted) {
    pthread_attr_t small;
    pthread_attr_init(&small), pthread_attr_setstacksize(&small, STACK);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
#ifndef _WIN32
    sigset_t all, before;  // signals are for the threads of Python; faults stay where they are
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    auto start = [](void *team) -> void * { return ((Team *)team)->work(), nullptr; };
    pthread_t thread;
    while (workers < wanted && !pthread_create(&thread, &small, start, this)) workers++;
    limit = workers < wanted ? workers : limit;
#ifndef _WIN32
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    pthread_attr_destroy(&small);
  }
  void open(uint64_t seats) {
    uint64_t g = gate.load(std::memory_order_relaxed), woken;
    do {
      const uint64_t awake = workers - g / SLEEPER;
      woken = seats > awake ? seats - awake : 0;
    } while (!gate.compare_exchange_weak(g, g + seats * SEAT - woken * SLEEPER,
                                         std::memory_order_release, std::memory_order_relaxed));
    if (!woken) return;
    std::unique_lock<std::mutex> lock(bed);
    calls += (int)woken;
    lock.unlock();
    for (; woken; woken--) alarm.notify_one();
  }
  // Close the door, and wait for those inside
  void close(Clock::time_point start) {
    if (!(gate.fetch_and(~SEATS, std::memory_order_acquire) % SEAT)) return;
    const auto done = Clock::now();
    for (int i = 1; gate.load(std::memory_order_acquire) % SEAT; i++)
      if (i % 1024) rest();
      else sched_yield();
    const auto end = Clock::now();
    if (end - done > SPIN && end - done > done - start) learn(start, end, end - done);
  }
  // A worker has lost its core in the midst of its share. If that took longer than what workers can
  // have saved since the last time, regions go without them: each time twice as long, up to LONGEST
  void learn(Clock::time_point start, Clock::time_point end, Clock::duration waited) {
    if (2 * waited < start - alone_until) pause /= 2;
    else pause = std::min<Clock::duration>(std::max<Clock::duration>(2 * pause, SHORTEST), LONGEST);
    alone_until = end + pause;
  }
  void run(int threads, Call f, const void *with) {
    if (threads < 2 || busy.exchange(true, std::memory_order_acquire)) return f(with);
    const auto start = Clock::now();
    const uint64_t seats = start < alone_until ? 0 : std::min<uint64_t>(threads - 1, limit);
    if (workers < seats) hire(seats);
    std::exception_ptr thrown;
    if (seats) {
      call = f, function = with;
      open(std::min(seats, workers));
      attempt();
      close(start);
      if (failed) failed = false, std::swap(thrown, error);
    }
    busy.store(false, std::memory_order_release);
    if (!seats) f(with);
    if (thrown) std::rethrow_exception(thrown);
  }

  Team(int cores = usable_cores()) : limit(cores > 0 ? cores - 1 : 1 << 16) {}
  // f() by the caller, and by up to threads - 1 workers; an exception of any of them is rethrown
  template <class F> void run(int threads, const F &f) {
    run(threads, [](const void *f) { (*(const F *)f)(); }, &f);
  }
};
static Team &team = *new Team;  // never destroyed: when the process exits, workers still use it
#ifndef _WIN32
// A child has this thread only, and begins anew
static const int at_fork = pthread_atfork(nullptr, nullptr, [] { new (&team) Team; });
#endif
#endif

// f(i) for all i below n, by up to so many threads. Each takes a run of them: its share of all that
// are left, so that the first runs are long and the last ones short
template <class F> static void for_all(int64_t n, int threads, const F &f) {
  alignas(64) std::atomic<int64_t> next(0);
  team.run(threads, [&] {
    for (int64_t i = next.load(std::memory_order_relaxed), end; i < n;) {
      end = std::min(n, i + std::max((n + 255) / 256, (n - i + threads - 1) / threads));
      if (!next.compare_exchange_weak(i, end, std::memory_order_relaxed)) continue;
      for (; i < end; i++) f(i);
      i = next.load(std::memory_order_relaxed);
    }
  });
}
