// A driver of kernels/team.h: runs the tests that are named, or all. test_threads.py compiles it,
// and .ci/run does with ThreadSanitizer. What threads write here is not atomic, so that it sees
// whether the team keeps them apart.
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>
static bool no_more_threads = false;
static int create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                  void *argument) {
  return no_more_threads ? EAGAIN : pthread_create(thread, attributes, start, argument);
}
#define pthread_create create
#include "../kernels/team.h"

using Clock = std::chrono::steady_clock;
#define REQUIRE(condition)                                           \
  do                                                                 \
    if (!(condition)) {                                              \
      printf("line %d: %s\n", __LINE__, #condition), fflush(stdout); \
      _exit(1);                                                      \
    }                                                                \
  while (false)

static void pass(int microseconds, int nanoseconds = 0) {  // without sleep
  const auto time = std::chrono::microseconds(microseconds) + std::chrono::nanoseconds(nanoseconds);
  for (const auto end = Clock::now() + time; Clock::now() < end;) continue;
}
// How many threads come into a region where all wait for so many, for seconds
static int come(int expected, int threads) {
  std::atomic<int> inside(0);
  team.alone_until = {};
  team.run(threads, [&] {
    inside++;
    const auto end = Clock::now() + std::chrono::seconds(3);
    while (inside < expected && Clock::now() < end) sched_yield();
  });
  return inside;
}
static uint64_t asleep() { return team.gate / Team::SLEEPER; }

static void each_index_once() {
  std::vector<int> done(1000);
  for (int round = 0; round < 6000; round++) {
    const int n = round % 1000;  // what one region writes is read by the next
    for_all(n, 2 + round % 2, [&](int64_t i) { done[i]++; });
    for_all(n, 2, [&](int64_t i) { done[n - 1 - i]--; });
    for (int i : done) REQUIRE(i == 0);
    if (round % 100 == 0) pass(100);
  }
}

// A worker that falls asleep while the door opens is not forgotten
static void nobody_is_forgotten() {
  team.careful_until = Clock::time_point::max();  // workers spin for SPIN
  REQUIRE(come(2, 2) == 2);
  for (int round = 0; round < 30000; round++) {
    pass(Team::SPIN.count() - 1, round % 128 * 16);
    REQUIRE(come(2, 2) == 2);
  }
}

static void many_callers() {
  std::vector<std::thread> callers;
  for (int threads : {1, 2, 8, 2, 8, 1})
    callers.emplace_back([=] {
      std::vector<int64_t> y(500);
      for (int round = 0; round < 1000; round++) {
        for_all(500, threads, [&](int64_t i) { y[i] = round + i; });
        for (int64_t i = 0; i < 500; i++) REQUIRE(y[i] == round + i);
      }
    });
  for (std::thread &caller : callers) caller.join();
}

// Of the caller, of a worker, of both: all leave, and the first reaches the caller
static void exceptions() {
  const auto caller = pthread_self();
  for (int round = 0; round < 3000; round++) {
    int left[2] = {}, first = -1, caught = -1;
    std::atomic<int> inside(0);
    std::atomic<bool> thrown(false);
    team.alone_until = {};
    try {
      team.run(2, [&] {
        const bool us = pthread_self() == caller, throws = round % 3 == 2 || us == round % 3;
        inside++;
        while (inside < 2) sched_yield();
        if (!throws) pass(10);
        left[us]++;
        if (throws && !thrown.exchange(true)) first = us;
        if (throws) throw (int)us;
      });
    } catch (int which) { caught = which; }
    REQUIRE(left[0] == 1 && left[1] == 1);
    REQUIRE(round % 3 == 2 ? caught >= 0 : caught == round % 3 && caught == first);
    REQUIRE(!team.error);
  }
  REQUIRE(come(2, 2) == 2);
}

// Threads that are there from an earlier call sleep on when fewer are asked for
static void fewer_threads() {
  team.limit = 7;
  REQUIRE(come(8, 8) == 8);
  while (asleep() < 7) usleep(1000);
  auto sleeps = [] {  // of all threads so far
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw;
  };
  const int64_t before = sleeps();
  for (int round = 0; round < 300; round++) {
    usleep(200);
    REQUIRE(come(2, 2) == 2);
  }
  REQUIRE(sleeps() - before < 300 * 5);  // the caller's own, and one worker's: not seven
  REQUIRE(come(4, 4) == 4);
  REQUIRE(come(8, 8) == 8);
}

static void threads_that_cannot_start() {
  team.limit = 7;
  REQUIRE(come(3, 3) == 3);
  no_more_threads = true;
  REQUIRE(come(3, 8) == 3);
  REQUIRE(team.limit == 2);
  each_index_once();
}

static int in_child() {  // the exit status of a child, where `expected` threads come
  const pid_t child = fork();
  if (!child) {
    alarm(20);
    _exit(come(2, 2) != 2);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}
static void children() {
  team.limit = 1;
  REQUIRE(in_child() == 0);  // before there is a worker
  REQUIRE(come(2, 2) == 2);
  for (int i = 0; i < 5; i++) REQUIRE(in_child() == 0);
  std::atomic<bool> done(false);
  std::thread other([&] {
    while (!done) team.run(2, [] { pass(3000); });
  });
  for (int i = 0; i < 20; i++) REQUIRE(in_child() == 0);
  done = true, other.join();
  REQUIRE(come(2, 2) == 2);
}

// Signals are for others, stacks are small, and who has no work sleeps soon
static void workers() {
  const auto caller = pthread_self();
  sigset_t blocked;
  size_t stack = 0;
  clockid_t clock;
  team.run(2, [] {});
  come(2, 2);
  team.alone_until = {};
  std::atomic<int> inside(0);
  team.run(2, [&] {
    inside++;
    while (inside < 2) sched_yield();
    if (pthread_self() == caller) return;
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstacksize(&attributes, &stack);
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    pthread_getcpuclockid(pthread_self(), &clock);
  });
  for (int signal : {SIGINT, SIGTERM, SIGALRM, SIGCHLD, SIGUSR1})
    REQUIRE(sigismember(&blocked, signal));
  REQUIRE(!sigismember(&blocked, SIGSEGV) && !sigismember(&blocked, SIGBUS));
#ifndef __SANITIZE_THREAD__  // which makes them larger
  REQUIRE(stack <= 2 * Team::STACK);
#endif
  auto used = [=] {
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
  };
  // A worker's time for each of 100 regions with such pauses between them; half an hour ago, or just
  // now, a thread lost its core
  auto each = [&](int microseconds, std::chrono::seconds careful) {
    double before = 0;
    for (int round = 0; round < 102; round++) {
      if (round == 2) before = used();  // it has learnt
      team.lost = false, team.careful_until = Clock::now() + careful;
      usleep(microseconds), come(2, 2);
    }
    return (used() - before) / 100;
  };
  const std::chrono::minutes ago(-30);
  const double seldom = each(4000, ago), often = each(1000, ago), lost = each(1000, -ago);
  printf("a worker spins for %.0f, %.0f and %.0f us\n", seldom, often, lost);
  REQUIRE(seldom > 5 && seldom < 300);
  REQUIRE(often > 600 && often < 2 * Team::LONG_SPIN.count());
  REQUIRE(lost > 5 && lost < 300);
}

// While other threads are in regions, and workers wait for more
static void exits() {
  for (int round = 0; round < 20; round++) {
    const pid_t child = fork();
    if (!child) {
      alarm(20);
      std::thread([] {
        for (;;) for_all(100, 2, [](int64_t) { pass(20); });
      }).detach();
      pass(round * 100);
      exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    REQUIRE(status == 0);
  }
}

#define TEST(name) {#name, name}
int main(int count, char **names) {
  const struct {
    const char *name;
    void (*run)();
  } tests[] = {
      TEST(each_index_once), TEST(nobody_is_forgotten),       TEST(many_callers), TEST(exceptions),
      TEST(fewer_threads),   TEST(threads_that_cannot_start), TEST(workers),      TEST(children),
      TEST(exits),
  };
  team.limit = 1;  // whatever the machine has
  int failed = 0;
  for (auto &test : tests) {
    bool named = count == 1;
    for (int i = 1; i < count; i++) named |= !strcmp(names[i], test.name);
    if (!named) continue;
    printf("%s\n", test.name), fflush(stdout);
    const pid_t child = fork();  // each has a team of its own
    if (!child) alarm(200), test.run(), exit(0);
    int status = -1;
    waitpid(child, &status, 0);
    if (status) printf("%s: status %d\n", test.name, status), failed = 1;
  }
  return failed;
}
