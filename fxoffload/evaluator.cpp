// What every candidate of the search is put through, on numbers instead of objects: the linear scan of spill.py, the overlap and the list
// schedule of overlap.py, the buckets of buckets.py and what is kept of them by fill.py. Those modules state the rules, in Python, and are what
// runs where no compiler is; this is the same arithmetic in the same order, so both give the same bits. native.py makes the tables.
//
// Events and Storages are numbers here: an event its place in the list of events, a Storage its place in the order of definition.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Rows of numbers: those of row i are from at[i] up to, not including, at[i + 1].
struct Rows {
  const int32_t* at;
  const int32_t* of;
};

struct Span {
  int32_t first, end;
};

struct Load {
  int32_t storage, before, start, bucket;
};
struct Spill {
  int32_t storage, after, until;
};
struct Sunk {
  int32_t start, until;
};
struct Stay {
  int32_t storage, first, last;
};

struct Scan {
  std::vector<Load> loads;
  std::vector<Spill> spills;
  std::vector<Sunk> sinks;
  std::vector<Stay> stays;
  std::vector<int32_t> live_at_worst;
  int64_t peak_bytes = 0, peak_event = 0, shortfall_bytes = 0, worst = 0;
};

}  // namespace

extern "C" {

// A Schedule with its least Ground. `index`: node indices of events; `next_use`: node indices, beside `touches`; `uses`: events; `made_by`: the
// event that makes a Storage; `rank`: of its name among the names; `read_bytes`: of all that an event reads; `border`, `graph_border`: node indices,
// of the Ground and of the graph; `before_border`, `border_event`: events. `never`, `far`, `crumbs`: spill.py's; `alignment`: of parts of a bucket.
struct Table {
  int64_t n_events, n_storages, border, graph_border, before_border, border_event, never, far, crumbs, alignment;
  const int64_t *index, *own_bytes, *workspace_bytes, *read_bytes;
  Rows makes, reads, touches, leaves, uses;
  const int64_t* next_use;
  const int64_t* n_bytes;
  const int32_t *rank, *tier, *made_by;
  const uint8_t *is_input, *is_tangent, *returned, *mergeable;
};

// Seconds of every event, of copies of every Storage, and of copies that are events; `sinks`: which events are. `dispatch_s`: of issuing
// an op, a copy that many times as long.
struct Seconds {
  const double *event_s, *load_s, *spill_s, *sink_s;
  const uint8_t* sinks;
  double dispatch_s, copy_issues;
};

}  // extern "C"

namespace {

class Spiller {
 public:
  Spiller(const Table& table, const uint8_t* fixed, int64_t capacity, const uint8_t* kept, const uint8_t* swapped)
      : t(table), fixed(fixed), capacity(capacity), kept(kept), swapped(swapped), first(t.n_storages, -1), touched(t.n_storages, 0),
        next(t.n_storages, -1), previous(t.n_storages, -1), seen(t.n_storages, -1), upcoming(t.n_storages, 0), movable(t.n_storages, 0),
        on_host(t.n_storages, 0) {}

  Scan* run(bool to_the_end) {
    for (position = 0; position < t.n_events; ++position) {
      step();
      if (found->shortfall_bytes && !to_the_end) return found;
    }
    position = static_cast<int32_t>(t.n_events) - 1;
    while (head >= 0) {
      touched[head] = position;
      leave(head);
    }
    return found;
  }

 private:
  const Table& t;
  const uint8_t* fixed;
  int64_t capacity;
  const uint8_t *kept, *swapped;
  std::vector<int32_t> first, touched, next, previous, seen;
  std::vector<int64_t> upcoming;
  std::vector<uint8_t> movable, on_host;
  // What is there, in the order it came.
  int32_t head = -1, tail = -1, position = 0;
  int64_t used = 0;
  bool in_backward = false;
  std::vector<int32_t> missing;
  Scan* found = new Scan;

  struct Leaving {
    double urgency;
    int32_t rank, storage;
    bool operator<(const Leaving& other) const {
      return urgency != other.urgency ? urgency > other.urgency : rank > other.rank;
    }
  };
  std::vector<Leaving> queue;

  void step() {
    const int64_t index = t.index[position];
    if (index > t.border && !in_backward) {
      in_backward = true;
      for (int32_t s = 0; s < t.n_storages; ++s)
        if (t.returned[s]) movable[s] = 0;
    }
    int64_t incoming = t.own_bytes[position];
    missing.clear();
    for (int32_t i = t.reads.at[position]; i < t.reads.at[position + 1]; ++i) {
      const int32_t s = t.reads.of[i];
      if (fixed[s]) continue;
      seen[s] = position;
      if (first[s] >= 0) {
        touched[s] = position;
      } else {
        missing.push_back(s);
        incoming += t.n_bytes[s];
      }
    }
    if (used + incoming > capacity) make_room(incoming);
    for (int32_t s : missing) found->loads.push_back({s, position, position, -1});
    for (int32_t s : missing) enter(s);
    for (int32_t i = t.makes.at[position]; i < t.makes.at[position + 1]; ++i) enter(t.makes.of[i]);
    const int64_t live = used + t.workspace_bytes[position];
    if (live > found->peak_bytes) {
      found->peak_bytes = live;
      found->peak_event = position;
    }
    for (int32_t i = t.touches.at[position]; i < t.touches.at[position + 1]; ++i)
      if (!fixed[t.touches.of[i]]) upcoming[t.touches.of[i]] = t.next_use[i];
    if (swapped) {
      swap_out(index);
    } else {
      for (int32_t i = t.leaves.at[position]; i < t.leaves.at[position + 1]; ++i)
        if (!fixed[t.leaves.of[i]]) leave(t.leaves.of[i]);
    }
  }

  void swap_out(int64_t index) {
    for (int32_t i = t.touches.at[position]; i < t.touches.at[position + 1]; ++i) {
      const int32_t s = t.touches.of[i];
      if (fixed[s]) continue;
      if (t.next_use[i] == t.never && !t.returned[s]) {
        leave(s);
      } else if (swapped[s] && first[s] >= 0 && index < t.border && t.border < t.next_use[i]) {
        evict(s, position + 1, position);
      }
    }
  }

  void make_room(int64_t incoming) {
    int64_t over = used + incoming - capacity;
    const int64_t index = t.index[position], wanted = over;
    queue.clear();
    for (int32_t s = head; s >= 0; s = next[s]) {
      if (!movable[s] || seen[s] == position) continue;
      const int64_t ahead = upcoming[s] - index;
      const double far = static_cast<double>(-(ahead < t.far ? ahead : t.far));
      const double way = t.is_input[s] || on_host[s] ? 1.0 : 0.5, crumb = t.n_bytes[s] * t.crumbs < wanted ? 1e-3 : 1.0;
      queue.push_back({far * way * crumb, t.rank[s], s});
    }
    std::make_heap(queue.begin(), queue.end());
    while (!queue.empty() && over > 0) {
      std::pop_heap(queue.begin(), queue.end());
      const int32_t s = queue.back().storage;
      queue.pop_back();
      over -= t.n_bytes[s];
      evict(s, position, position - 1);
    }
    if (over > found->shortfall_bytes) {
      found->shortfall_bytes = over;
      found->worst = position;
      tell_live();
    }
  }

  void tell_live() {
    auto& live = found->live_at_worst;
    live.clear();
    for (int32_t s = head; s >= 0; s = next[s]) live.push_back(s);
    for (int32_t i = t.reads.at[position]; i < t.reads.at[position + 1]; ++i)
      if (const int32_t s = t.reads.of[i]; !fixed[s] && first[s] < 0) live.push_back(s);
    for (int32_t i = t.makes.at[position]; i < t.makes.at[position + 1]; ++i)
      if (const int32_t s = t.makes.of[i]; std::find(live.begin(), live.end(), s) == live.end()) live.push_back(s);
  }

  // The last event before number `limit` that reads the Storage, else the one that makes it.
  int32_t last_touch(int32_t s, int32_t limit) const {
    const int32_t *begin = t.uses.of + t.uses.at[s], *end = t.uses.of + t.uses.at[s + 1];
    const int32_t* at = std::lower_bound(begin, end, limit);
    return at == begin ? t.made_by[s] : at[-1];
  }

  void evict(int32_t s, int32_t limit, int32_t until) {
    if (t.is_input[s] || on_host[s]) {
      leave(s);
      return;
    }
    const int32_t after = last_touch(s, limit);
    if (after < 0) throw std::logic_error("a value leaves that no event makes");
    if (t.index[after] < t.border && t.border <= t.index[until]) until = static_cast<int32_t>(t.before_border);
    touched[s] = std::max(touched[s], until);
    leave(s);
    on_host[s] = 1;
    found->spills.push_back({s, after, std::max(until, after)});
  }

  void enter(int32_t s) {
    if (first[s] >= 0) return;
    first[s] = touched[s] = position;
    previous[s] = tail;
    next[s] = -1;
    (tail >= 0 ? next[tail] : head) = s;
    tail = s;
    used += t.n_bytes[s];
    movable[s] = !kept[s] && !(in_backward && t.returned[s]);
  }

  void leave(int32_t s) {
    if (first[s] < 0) return;
    found->stays.push_back({s, first[s], touched[s]});
    first[s] = -1;
    movable[s] = 0;
    (previous[s] >= 0 ? next[previous[s]] : head) = next[s];
    (next[s] >= 0 ? previous[next[s]] : tail) = previous[s];
    used -= t.n_bytes[s];
  }
};

int64_t padded(const Table& t, int64_t n_bytes) { return (n_bytes + t.alignment - 1) / t.alignment * t.alignment; }

// Bytes at each event, of spans of events.
class Spans {
 public:
  explicit Spans(int64_t n_events) : change(n_events + 1, 0) {}
  void add(int64_t first, int64_t end, int64_t n_bytes) {
    change[first] += n_bytes;
    change[end] -= n_bytes;
  }
  void sum_into(int64_t* bytes) const {
    int64_t total = 0;
    for (size_t i = 0; i + 1 < change.size(); ++i) bytes[i] += total += change[i];
  }

 private:
  std::vector<int64_t> change;
};

void add_stays(const Table& t, const Scan& found, Spans& spans) {
  for (const Stay& one : found.stays) spans.add(one.first, one.last + 1, t.n_bytes[one.storage]);
}

std::vector<double> seconds_before(const Table& t, const Seconds& seconds) {
  std::vector<double> before(t.n_events + 1, 0.0);
  for (int64_t i = 0; i < t.n_events; ++i) before[i + 1] = before[i] + seconds.event_s[i];
  return before;
}

void take(int64_t* free, int64_t first, int64_t end, int64_t n_bytes) {
  for (int64_t i = first; i < end; ++i) free[i] -= n_bytes;
}

void pull_apart(const Table& t, const Seconds& seconds, const Scan& found, double slack, int64_t* free, Scan& result) {
  const std::vector<double> before_use = seconds_before(t, seconds);
  std::vector<int32_t> gone(t.n_storages, -1);
  for (const Spill& one : found.spills) gone[one.storage] = one.until;
  std::vector<Load> loads = found.loads;
  std::stable_sort(loads.begin(), loads.end(), [](const Load& a, const Load& b) { return a.before < b.before; });
  std::vector<int64_t> in_time(loads.size());
  double deadline_s = std::numeric_limits<double>::infinity();
  for (size_t i = loads.size(); i-- > 0;) {
    deadline_s = std::min(deadline_s, before_use[loads[i].before]) - seconds.load_s[loads[i].storage] * slack;
    in_time[i] = std::upper_bound(before_use.begin(), before_use.end(), deadline_s) - before_use.begin() - 1;
  }
  int64_t start = 0;
  for (size_t i = 0; i < loads.size(); ++i) {
    const int64_t at = loads[i].before, n_bytes = t.n_bytes[loads[i].storage];
    const int64_t lowest = std::max<int64_t>(gone[loads[i].storage] + 1, at > t.border_event ? t.border_event + 1 : 0);
    const int64_t wanted = std::min(at, std::max({lowest, in_time[i], start}));
    start = at;
    while (start > wanted && free[start - 1] >= n_bytes) --start;
    take(free, start, at, n_bytes);
    loads[i].start = static_cast<int32_t>(start);
    loads[i].bucket = -1;
  }
  std::stable_sort(loads.begin(), loads.end(), [](const Load& a, const Load& b) {
    return a.before != b.before ? a.before < b.before : a.start < b.start;
  });
  result.loads = std::move(loads);

  std::vector<double> sent(t.n_events, 0.0);
  std::vector<uint8_t> sends(t.n_events, 0);
  for (const Spill& one : found.spills) {
    sent[one.after] += seconds.spill_s[one.storage];
    sends[one.after] = 1;
  }
  double d2h_s = 0.0;
  const int64_t last = t.n_events - 2;
  result.sinks.clear();
  for (int64_t i = 0; i < t.n_events; ++i) {
    if (sends[i]) d2h_s = std::max(d2h_s, before_use[i + 1]) + sent[i] * slack;
    if (!seconds.sinks[i]) continue;
    d2h_s = std::max(d2h_s, before_use[i + 1]) + seconds.sink_s[i] * slack;
    const int64_t ended = std::lower_bound(before_use.begin(), before_use.end(), d2h_s) - before_use.begin() - 1;
    const int64_t wanted = std::max(i, std::min(last, ended)), n_bytes = t.read_bytes[i];
    int64_t until = i;
    while (until < wanted && free[until + 1] >= n_bytes) ++until;
    take(free, i + 1, until + 1, n_bytes);
    result.sinks.push_back({static_cast<int32_t>(i), static_cast<int32_t>(until)});
  }
}

// The end of the stay that each load begins, of those that may be in a bucket; -1 of others.
std::vector<int32_t> ends_of(const Table& t, const Scan& found) {
  std::vector<int32_t> ends(found.loads.size(), -1), loads, stays;
  std::vector<uint8_t> loaded(t.n_storages, 0);
  for (size_t i = 0; i < found.loads.size(); ++i)
    if (t.mergeable[found.loads[i].storage]) {
      loads.push_back(static_cast<int32_t>(i));
      loaded[found.loads[i].storage] = 1;
    }
  for (size_t i = 0; i < found.stays.size(); ++i)
    if (loaded[found.stays[i].storage]) stays.push_back(static_cast<int32_t>(i));
  std::stable_sort(loads.begin(), loads.end(), [&](int32_t a, int32_t b) {
    const Load &x = found.loads[a], &y = found.loads[b];
    return x.storage != y.storage ? x.storage < y.storage : x.before < y.before;
  });
  std::stable_sort(stays.begin(), stays.end(), [&](int32_t a, int32_t b) {
    const Stay &x = found.stays[a], &y = found.stays[b];
    return x.storage != y.storage ? x.storage < y.storage : x.first < y.first;
  });
  if (loads.size() != stays.size()) throw std::logic_error("not every copy to the device begins a stay");
  for (size_t i = 0; i < loads.size(); ++i) {
    if (found.loads[loads[i]].storage != found.stays[stays[i]].storage) throw std::logic_error("a stay begins without a copy");
    ends[loads[i]] = found.stays[stays[i]].last;
  }
  return ends;
}

struct Copy {
  int32_t start, end;
  int64_t n_bytes;
  int32_t kind;  // -1: in no group
};

class Grouping {
 public:
  std::vector<std::vector<int32_t>> found;

  Grouping(const Table& t, int64_t* alive, int64_t limit_bytes, double held_up)
      : t(t), alive(alive), n_events(t.n_events), limit(limit_bytes), held_up(held_up) {
    for (int64_t i = 0; i < n_events; ++i) peak = std::max(peak, alive[i]);
    open();
  }

  void run(const std::vector<Copy>& copies) {
    for (size_t i = 0; i < copies.size(); ++i) take_one(static_cast<int32_t>(i), copies[i]);
    end_group();
  }

 private:
  const Table& t;
  int64_t* alive;
  int64_t n_events, limit;
  double held_up;
  int64_t peak = 0, first = 0, end = 0, room_bytes = 0, group_bytes = 0;
  std::vector<int32_t> numbers;
  std::vector<Copy> group;
  double ahead_bytes = 0.0;

  void open() {
    first = n_events;
    end = room_bytes = 0;
  }

  void take_one(int32_t number, const Copy& copy) {
    if (copy.kind < 0 || copy.n_bytes >= limit) {
      ahead_bytes = std::min(ahead_bytes, static_cast<double>(copy.n_bytes) * held_up);
      return;
    }
    if (!has_place(copy)) {
      end_group();
      ahead_bytes = std::numeric_limits<double>::infinity();
    }
    numbers.push_back(number);
    group.push_back(copy);
    take(alive, copy.start, copy.end, copy.n_bytes);
    first = std::min<int64_t>(first, copy.start);
    end = std::max<int64_t>(end, copy.end);
    room_bytes += padded(t, copy.n_bytes);
    group_bytes += copy.n_bytes;
    ahead_bytes -= static_cast<double>(copy.n_bytes);
  }

  void end_group() {
    if (group.size() > 1) {
      found.push_back(numbers);
      take(alive, first, end, -room_bytes);
    } else {
      for (const Copy& one : group) take(alive, one.start, one.end, -one.n_bytes);
    }
    open();
    numbers.clear();
    group.clear();
    group_bytes = 0;
  }

  bool has_place(const Copy& copy) const {
    if (group.empty() || group[0].kind != copy.kind) return false;
    if (group_bytes >= limit || static_cast<double>(copy.n_bytes) > ahead_bytes) return false;
    const int64_t from = std::min<int64_t>(first, copy.start), to = std::max<int64_t>(end, copy.end);
    const int64_t room = peak - room_bytes - padded(t, copy.n_bytes);
    return room >= 0 && fits(copy.start, copy.end, room + copy.n_bytes) && fits(from, copy.start, room) && fits(copy.end, to, room);
  }

  bool fits(int64_t from, int64_t to, int64_t room) const {
    for (int64_t i = from; i < to; ++i)
      if (alive[i] > room) return false;
    return true;
  }
};

// The loads by transfer, a bucket where its first one is.
std::vector<std::vector<int32_t>> transfers_of(const Scan& found) {
  std::vector<std::vector<int32_t>> transfers;
  std::vector<int32_t> bucket_at;
  for (size_t i = 0; i < found.loads.size(); ++i) {
    const int32_t bucket = found.loads[i].bucket, number = static_cast<int32_t>(i);
    if (bucket < 0) {
      transfers.push_back({number});
      continue;
    }
    if (bucket >= static_cast<int32_t>(bucket_at.size())) bucket_at.resize(bucket + 1, -1);
    if (bucket_at[bucket] < 0) {
      bucket_at[bucket] = static_cast<int32_t>(transfers.size());
      transfers.push_back({number});
    } else {
      transfers[bucket_at[bucket]].push_back(number);
    }
  }
  return transfers;
}

// Numbers by event, in the order they were put there.
class ByEvent {
 public:
  explicit ByEvent(int64_t n_events) : head(n_events, -1), tail(n_events, -1) {}
  void put(int32_t event, int32_t number) {
    const int32_t at = static_cast<int32_t>(links.size());
    links.push_back({number, -1});
    (tail[event] >= 0 ? links[tail[event]].second : head[event]) = at;
    tail[event] = at;
  }
  bool has(int64_t event) const { return head[event] >= 0; }
  template <class F>
  void each(int64_t event, F f) const {
    for (int32_t at = head[event]; at >= 0; at = links[at].second) f(links[at].first);
  }

 private:
  std::vector<int32_t> head, tail;
  std::vector<std::pair<int32_t, int32_t>> links;
};

class Run {
 public:
  std::vector<double> stall_s;
  std::vector<int32_t> stalled;

  Run(const Table& t, const Seconds& seconds, const Scan& found, const double* merged_s)
      : stall_s(t.n_storages, 0.0), t(t), seconds(seconds), transfers(transfers_of(found)), copy_s(transfers.size()), first(transfers.size()),
        arrived(transfers.size(), -1.0), starting(t.n_events), awaited(t.n_events), leaving(t.n_events), left(t.n_events),
        until(t.n_events, -1), sunk(t.n_events, 0.0), gone(t.n_storages, 0.0), ends(t.n_events, 0), found(found) {
    for (size_t number = 0; number < transfers.size(); ++number) {
      const auto& members = transfers[number];
      copy_s[number] = members.size() == 1 ? seconds.load_s[found.loads[members[0]].storage] : *merged_s++;
      first[number] = members[0];
      for (int32_t member : members)
        if (found.loads[member].before < found.loads[first[number]].before) first[number] = member;
      starting.put(found.loads[members[0]].start, static_cast<int32_t>(number));
      awaited.put(found.loads[first[number]].before, static_cast<int32_t>(number));
    }
    spills = found.spills;
    std::stable_sort(spills.begin(), spills.end(), [](const Spill& a, const Spill& b) { return a.until < b.until; });
    for (size_t i = 0; i < spills.size(); ++i) {
      leaving.put(spills[i].after, static_cast<int32_t>(i));
      ends[spills[i].after] = 1;
      if (spills[i].until == spills[i].after) continue;
      left.put(spills[i].until, static_cast<int32_t>(i));
      ends[spills[i].until] = 1;
    }
    for (const Sunk& one : found.sinks) {
      until[one.start] = one.until;
      ends[one.until] = 1;
    }
    for (int64_t i = 0; i < t.n_events; ++i) ends[i] |= seconds.sinks[i];
  }

  double end_s() {
    for (int64_t i = 0; i < t.n_events; ++i) {
      starting.each(i, [&](int32_t number) {
        issue(seconds.copy_issues);
        h2d = arrived[number] = std::max(now, h2d) + copy_s[number];
      });
      awaited.each(i, [&](int32_t number) {
        if (arrived[number] < 0) throw std::logic_error("a copy is awaited before it starts");
        if (arrived[number] <= now) return;
        const int32_t storage = found.loads[first[number]].storage;
        if (stall_s[storage] == 0.0) stalled.push_back(storage);
        stall_s[storage] += arrived[number] - now;
        now = arrived[number];
      });
      compute(i);
      if (ends[i]) end(i);
    }
    return std::max({now, h2d, d2h});
  }

  // A pass in which copies to the device start as soon as they may and are soon to be needed: the event before which each does.
  std::vector<int32_t> starts_just_in_time(double ahead_s, double faster) {
    std::vector<int32_t> start(transfers.size(), -1), queue;
    size_t next = 0;
    auto begin = [&](int64_t i, double reached) {
      const int32_t number = queue[next++];
      issue(seconds.copy_issues);
      start[number] = static_cast<int32_t>(i);
      h2d = arrived[number] = std::max(reached, h2d) + copy_s[number] * faster;
    };
    for (int64_t i = 0; i < t.n_events; ++i) {
      const double reached = now;
      starting.each(i, [&](int32_t number) { queue.push_back(number); });
      awaited.each(i, [&](int32_t number) {
        while (start[number] < 0) {
          if (next == queue.size()) throw std::logic_error("a copy is awaited before it starts");
          begin(i, reached);
        }
      });
      awaited.each(i, [&](int32_t number) { now = std::max(now, arrived[number]); });
      compute(i);
      if (ends[i]) end(i);
      while (next < queue.size() && h2d < now + ahead_s) begin(i, reached);
    }
    return start;
  }

  const std::vector<std::vector<int32_t>>& all() const { return transfers; }

 private:
  const Table& t;
  const Seconds& seconds;
  std::vector<std::vector<int32_t>> transfers;
  std::vector<double> copy_s;
  std::vector<int32_t> first;
  std::vector<double> arrived;
  ByEvent starting, awaited, leaving, left;
  std::vector<int32_t> until;
  std::vector<double> sunk, gone;
  std::vector<uint8_t> ends;
  std::vector<Spill> spills;
  std::vector<int32_t> backwards;
  const Scan& found;
  double now = 0.0, issued = 0.0, h2d = 0.0, d2h = 0.0;

  void compute(int64_t i) {
    if (seconds.event_s[i] == 0.0) return;
    if (seconds.dispatch_s > 0) issue(1.0);
    now += seconds.event_s[i];
  }

  void end(int64_t i) {
    if (seconds.sinks[i]) {
      const int64_t at = until[i] >= 0 ? until[i] : i;
      sunk[at] = std::max(sunk[at], send(seconds.sink_s[i]));
    }
    now = std::max(now, sunk[i]);
    left.each(i, [&](int32_t number) { now = std::max(now, gone[spills[number].storage]); });
    backwards.clear();
    leaving.each(i, [&](int32_t number) { backwards.push_back(number); });
    for (size_t k = backwards.size(); k-- > 0;) {
      const Spill& one = spills[backwards[k]];
      gone[one.storage] = send(seconds.spill_s[one.storage]);
      if (one.until == one.after) now = std::max(now, gone[one.storage]);
    }
  }

  void issue(double ops) {
    issued += ops * seconds.dispatch_s;
    if (issued > now) now = issued;
  }

  double send(double copy) {
    issue(seconds.copy_issues);
    return d2h = std::max(now, d2h) + copy;
  }
};

// Bytes at each event, of which the most is asked for over long spans: with the most of every 64 events, and what is added to all of them.
class Curve {
 public:
  Curve(const int64_t* bytes, int64_t n_events) : bytes(bytes, bytes + n_events), most_of((n_events + 63) / 64, 0), added(most_of.size(), 0) {
    for (int64_t i = 0; i < n_events; ++i) most_of[i / 64] = i % 64 ? std::max(most_of[i / 64], bytes[i]) : bytes[i];
  }

  // Not below `least`.
  int64_t most(int64_t first, int64_t end, int64_t least = 0) const {
    int64_t found = least;
    for (int64_t i = first; i < end;) {
      if (i % 64 == 0 && i + 64 <= end) {
        found = std::max(found, most_of[i / 64]);
        i += 64;
      } else {
        found = std::max(found, bytes[i] + added[i / 64]);
        ++i;
      }
    }
    return found;
  }

  void add(int64_t first, int64_t end, int64_t n_bytes) {
    for (int64_t i = first; i < end;) {
      if (i % 64 == 0 && i + 64 <= end) {
        most_of[i / 64] += n_bytes;
        added[i / 64] += n_bytes;
        i += 64;
      } else {
        const int64_t at = i / 64, stop = std::min(end, (at + 1) * 64);
        for (; i < stop; ++i) bytes[i] += n_bytes;
        const int64_t last = std::min<int64_t>(static_cast<int64_t>(bytes.size()), (at + 1) * 64);
        most_of[at] = *std::max_element(bytes.begin() + at * 64, bytes.begin() + last) + added[at];
      }
    }
  }

 private:
  std::vector<int64_t> bytes, most_of, added;
};

// `spans` and `loads`: from one place in what Filler has of them up to, not including, another.
struct Item {
  int32_t storage, spill;
  Span spans, loads;
  double seconds;
  bool resides;
  int64_t n_before;
  double per_byte;
  int64_t during;
};

// The events before number `end` back to the last at which the Storage is there; none where it ends where it begins.
Span before_of(const Span* there, const Span* end_there, int32_t end) {
  int32_t last = 0;
  for (const Span* one = there; one != end_there; ++one)
    if (one->first < std::min(one->end, end)) last = std::max(last, std::min(one->end, end));
  return {last, std::max(last, end)};
}

// The events in none of the spans.
std::vector<Span> beside_of(std::vector<Span> spans, int32_t n_events) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.first != b.first ? a.first < b.first : a.end < b.end; });
  std::vector<Span> found;
  int32_t at = 0;
  for (const Span& one : spans) {
    if (one.first > at) found.push_back({at, one.first});
    at = std::max(at, one.end);
  }
  if (at < n_events) found.push_back({at, n_events});
  return found;
}

// Numbers by Storage, each row in the order in which they are given: `each(f)` calls `f(storage, number)` for all of them.
template <class T>
class ByStorage {
 public:
  template <class Each>
  ByStorage(int64_t n_storages, Each each) : at(n_storages + 1, 0) {
    each([&](int32_t storage, const T&) { ++at[storage + 1]; });
    for (int64_t s = 0; s < n_storages; ++s) at[s + 1] += at[s];
    of.resize(at.back());
    std::vector<int32_t> next(at.begin(), at.end() - 1);
    each([&](int32_t storage, const T& one) { of[next[storage]++] = one; });
  }
  T* begin(int32_t storage) { return of.data() + at[storage]; }
  T* end(int32_t storage) { return of.data() + at[storage + 1]; }
  int32_t size(int32_t storage) const { return at[storage + 1] - at[storage]; }

 private:
  std::vector<int32_t> at;
  std::vector<T> of;
};

class Filler {
 public:
  Filler(const Table& t, const Seconds& seconds, const Scan& found, const uint8_t* may_reside, const uint8_t* must_leave, bool from_buckets)
      : t(t), seconds(seconds), found(found), may_reside(may_reside), must_leave(must_leave), from_buckets(from_buckets) {}

  void add_copies() {
    ByStorage<int32_t> copies(t.n_storages, [&](auto put) {
      for (size_t i = 0; i < found.loads.size(); ++i) put(found.loads[i].storage, static_cast<int32_t>(i));
    });
    ByStorage<Span> there(t.n_storages, [&](auto put) {
      for (const Stay& one : found.stays)
        if (copies.size(one.storage)) put(one.storage, Span{one.first, one.last + 1});
      for (const Load& one : found.loads) put(one.storage, Span{one.start, one.before});
    });
    std::vector<int32_t> spills(t.n_storages, -1);
    for (size_t i = 0; i < found.spills.size(); ++i) spills[found.spills[i].storage] = static_cast<int32_t>(i);
    for (size_t i = 0; i < found.loads.size(); ++i) {
      const int32_t s = found.loads[i].storage;
      if (copies.begin(s)[0] != static_cast<int32_t>(i) || must_leave[s]) continue;
      if (t.is_input[s]) {
        add_input(s, copies.begin(s), copies.end(s), there.begin(s), there.end(s));
      } else if (copies.size(s) == 1) {
        if (spills[s] < 0) throw std::logic_error("a value returns that never left");
        const Span ahead = before_of(there.begin(s), there.end(s), found.loads[i].start);
        add(s, &ahead, &ahead + (ahead.first < ahead.end), copies.begin(s), copies.end(s), spills[s], seconds.load_s[s] + seconds.spill_s[s]);
      }
    }
  }

  void add_table(int32_t storage, double saved_s) {
    const Span whole{0, static_cast<int32_t>(t.n_events)};
    add(storage, &whole, &whole + 1, nullptr, nullptr, -1, saved_s, true);
  }

  // What is kept under `capacity` of what `most` has room for; `used` is what the scan takes.
  Scan* filled(const int64_t* used, int64_t capacity, int64_t most, uint8_t* resident, int64_t* peak_bytes) {
    std::vector<int32_t> order(items.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t k) {
      const Item &a = items[i], &b = items[k];
      if (a.per_byte != b.per_byte) return a.per_byte < b.per_byte;
      return a.during != b.during ? a.during < b.during : t.rank[a.storage] < t.rank[b.storage];
    });
    Curve with_all(used, t.n_events);
    std::vector<std::pair<int64_t, int64_t>> reached(t.n_storages, {0, 0});  // how many thresholds of a Storage, and the largest
    std::vector<std::pair<int64_t, const Item*>> fitting;
    for (int32_t i : order) {
      const Item& item = items[i];
      auto& [n_reached, largest] = reached[item.storage];
      int64_t room_for = most_of(with_all, item);
      if (item.resides && n_reached) room_for = std::max(room_for, largest);
      if (room_for > most || (item.resides && n_reached < item.n_before)) continue;
      largest = n_reached ? std::max(largest, room_for) : room_for;
      ++n_reached;
      keep(with_all, item);
      fitting.push_back({room_for, &item});
    }
    std::stable_sort(fitting.begin(), fitting.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<const Item*> taken;
    Curve curve(used, t.n_events);
    for (const auto& [room_for, item] : fitting) {
      if (room_for > capacity && most_of(curve, *item) > capacity) break;
      keep(curve, *item);
      taken.push_back(item);
      if (item->resides) resident[item->storage] = 1;
    }
    *peak_bytes = curve.most(0, t.n_events);
    return taken.empty() ? nullptr : without(taken, resident);
  }

 private:
  const Table& t;
  const Seconds& seconds;
  const Scan& found;
  const uint8_t *may_reside, *must_leave;
  const bool from_buckets;
  std::vector<Item> items;
  std::vector<Span> spans, there;
  std::vector<int32_t> loads;

  // The most there is at an event of its spans with it.
  int64_t most_of(const Curve& curve, const Item& item) const {
    int64_t most = 0;
    for (int32_t k = item.spans.first; k < item.spans.end; ++k) most = std::max(most, curve.most(spans[k].first, spans[k].end));
    return most + t.n_bytes[item.storage];
  }

  void keep(Curve& curve, const Item& item) const {
    for (int32_t k = item.spans.first; k < item.spans.end; ++k) curve.add(spans[k].first, spans[k].end, t.n_bytes[item.storage]);
  }

  void add(int32_t s, const Span* first_span, const Span* end_span, const int32_t* first_load, const int32_t* end_load, int32_t spill, double saved_s,
           bool resides = false, int64_t n_before = 0) {
    const auto place = [](const auto& all) { return static_cast<int32_t>(all.size()); };
    Item item{s, spill, {place(spans), 0}, {place(loads), 0}, saved_s, resides, n_before, 0.0, resides ? t.n_events : 0};
    for (const Span* one = first_span; one != end_span; ++one) {
      spans.push_back(*one);
      if (!resides) item.during += one->end - one->first;
    }
    for (const int32_t* one = first_load; one != end_load; ++one) loads.push_back(*one);
    item.spans.end = place(spans);
    item.loads.end = place(loads);
    item.per_byte = -saved_s / static_cast<double>(std::max<int64_t>(t.n_bytes[s], 1));
    items.push_back(item);
  }

  void add_input(int32_t s, int32_t* copies, int32_t* end, const Span* first_there, const Span* end_there) {
    const double load_s = seconds.load_s[s];
    std::stable_sort(copies, end, [&](int32_t a, int32_t b) { return found.loads[a].before < found.loads[b].before; });
    there.assign(first_there, end_there);
    if (std::any_of(copies, from_buckets ? end - 1 : end, [&](int32_t copy) { return found.loads[copy].bucket >= 0; })) {
      if (may_reside[s] && from_buckets) add_beside(s, copies, end, load_s * static_cast<double>(end - copies), 0);
      return;
    }
    for (const int32_t* copy = copies + 1; copy < end; ++copy) {
      const Span ahead = before_of(first_there, end_there, found.loads[*copy].start);
      const bool is_some = ahead.first < ahead.end;
      if (is_some) there.push_back(ahead);
      add(s, &ahead, &ahead + is_some, copy, copy + 1, -1, load_s);
    }
    if (may_reside[s]) add_beside(s, copies, copies + 1, load_s, end - copies - 1);
  }

  // Residing, at the events in none of the spans of `there`.
  void add_beside(int32_t s, const int32_t* copies, const int32_t* end, double saved_s, int64_t n_before) {
    const std::vector<Span> beside = beside_of(there, static_cast<int32_t>(t.n_events));
    add(s, beside.data(), beside.data() + beside.size(), copies, end, -1, saved_s, true, n_before);
  }

  // The scan without the copies that the items save; what was apart is one stay.
  Scan* without(const std::vector<const Item*>& taken, const uint8_t* resident) const {
    std::vector<uint8_t> saved(found.loads.size(), 0), kept(found.spills.size(), 0);
    std::vector<int32_t> joins;
    std::vector<uint8_t> joined(t.n_storages, 0);
    for (const Item* item : taken) {
      for (int32_t k = item->loads.first; k < item->loads.end; ++k) {
        saved[loads[k]] = 1;
        if (!joined[item->storage]) joins.push_back(item->storage);
        joined[item->storage] = 1;
      }
      if (item->spill >= 0) kept[item->spill] = 1;
    }
    Scan* result = new Scan(found);
    result->loads.clear();
    result->spills.clear();
    result->stays.clear();
    for (size_t i = 0; i < found.loads.size(); ++i)
      if (!saved[i]) result->loads.push_back(found.loads[i]);
    for (size_t i = 0; i < found.spills.size(); ++i)
      if (!kept[i]) result->spills.push_back(found.spills[i]);
    for (const Stay& one : found.stays)
      if (!joined[one.storage] && !resident[one.storage]) result->stays.push_back(one);
    ByStorage<int32_t> copies(t.n_storages, [&](auto put) {
      for (size_t i = 0; i < found.loads.size(); ++i)
        if (joined[found.loads[i].storage]) put(found.loads[i].storage, static_cast<int32_t>(i));
    });
    ByStorage<Stay> parts(t.n_storages, [&](auto put) {
      for (const Stay& one : found.stays)
        if (joined[one.storage]) put(one.storage, one);
    });
    for (int32_t s : joins) {
      if (resident[s]) continue;
      int32_t* const of = copies.begin(s);
      Stay* const stays = parts.begin(s);
      std::stable_sort(of, copies.end(s), [&](int32_t a, int32_t b) { return found.loads[a].before < found.loads[b].before; });
      std::stable_sort(stays, parts.end(s), [](const Stay& a, const Stay& b) { return a.first < b.first; });
      const int32_t skipped = t.is_input[s] ? 1 : 0;
      if (copies.size(s) - skipped != parts.size(s) - 1) throw std::logic_error("not every copy to the device begins a stay");
      Stay now = stays[0];
      for (int32_t i = 1; i < parts.size(s); ++i) {
        if (saved[of[i - 1 + skipped]]) {
          now.last = stays[i].last;
        } else {
          result->stays.push_back(now);
          now = stays[i];
        }
      }
      result->stays.push_back(now);
    }
    return result;
  }
};

struct Gap {
  int32_t storage, after, before;
};

// Between the events that touch each Storage, of the least Ground: the same ones whatever resides. Those of a Storage lie side by side.
struct Gaps {
  std::vector<int32_t> order;                 // Storages by the event that touches them first
  std::vector<std::vector<int32_t>> touches;  // events, of each Storage
  std::vector<Gap> every;
  std::vector<int32_t> at, n;  // of each Storage: its first gap, and how many

  explicit Gaps(const Table& t) : touches(t.n_storages), at(t.n_storages, 0), n(t.n_storages, 0) {
    for (int32_t i = 0; i < t.n_events; ++i)
      for (int32_t k = t.touches.at[i]; k < t.touches.at[i + 1]; ++k) {
        auto& of = touches[t.touches.of[k]];
        if (of.empty()) order.push_back(t.touches.of[k]);
        if (of.empty() || of.back() != i) of.push_back(i);
      }
    for (int32_t s : order) {
      at[s] = static_cast<int32_t>(every.size());
      for (size_t k = 1; k < touches[s].size(); ++k)
        if (touches[s][k] != touches[s][k - 1] + 1) every.push_back({s, touches[s][k - 1], touches[s][k]});
      n[s] = static_cast<int32_t>(every.size()) - at[s];
    }
  }
};

struct Worth {
  double per_byte;
  int32_t after, rank, gap, storage;
};

// What resides and which gaps are stayed in, in one order of worth as long as they fit: gaps.py's `packed_jointly`.
void pack(const Table& t, const Seconds& seconds, const uint8_t* fixed, const uint8_t* kept, const uint8_t* swapped, const uint8_t* free,
          int64_t capacity, double power, uint8_t* stays, uint8_t* resident) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min() / 4;
  const Gaps gaps(t);
  std::vector<int64_t> needed(t.workspace_bytes, t.workspace_bytes + t.n_events);
  for (int32_t s : gaps.order) {
    if (fixed[s]) continue;
    for (int32_t i : gaps.touches[s]) needed[i] += t.n_bytes[s];
    if (t.returned[s]) take(needed.data(), gaps.touches[s].back() + 1, t.n_events, -t.n_bytes[s]);
  }
  Curve used(needed.data(), t.n_events);
  std::vector<Worth> order;
  for (int32_t i = 0; i < static_cast<int32_t>(gaps.every.size()); ++i) {
    const auto& [s, after, before] = gaps.every[i];
    if (fixed[s]) continue;
    const bool behind = t.index[after] >= t.border;
    if (t.is_tangent[s] || kept[s] || (behind && t.returned[s])) {
      used.add(after + 1, before, t.n_bytes[s]);
      stays[i] = 1;
      continue;
    }
    if (swapped && swapped[s] && t.index[after] < t.border && t.border < t.index[before]) continue;
    double saved_s = seconds.load_s[s];
    saved_s += t.is_input[s] ? 0.0 : seconds.spill_s[s] / gaps.n[s];
    const double bytes = static_cast<double>(std::max<int64_t>(t.n_bytes[s], 1));
    order.push_back({-saved_s / (bytes * std::pow(static_cast<double>(before - after), power)), after, t.rank[s], i, s});
  }
  for (int32_t s : gaps.order) {
    if (fixed[s] || !t.is_input[s] || !free[s]) continue;
    const double saved_s = seconds.load_s[s] * (1 + gaps.n[s]), bytes = static_cast<double>(std::max<int64_t>(t.n_bytes[s], 1));
    order.push_back({-saved_s / (bytes * std::pow(static_cast<double>(t.n_events), power)), -1, t.rank[s], -1, s});
  }
  std::stable_sort(order.begin(), order.end(), [](const Worth& a, const Worth& b) {
    if (a.per_byte != b.per_byte) return a.per_byte < b.per_byte;
    return a.after != b.after ? a.after < b.after : a.rank < b.rank;
  });
  for (const Worth& one : order) {
    const int64_t n_bytes = t.n_bytes[one.storage];
    if (one.gap >= 0) {
      const Gap& gap = gaps.every[one.gap];
      if (resident[one.storage] || used.most(gap.after + 1, gap.before, kLeast) + n_bytes > capacity) continue;
      used.add(gap.after + 1, gap.before, n_bytes);
      stays[one.gap] = 1;
      continue;
    }
    const auto& touches = gaps.touches[one.storage];
    std::vector<Span> beside{{0, touches.front()}, {touches.back() + 1, static_cast<int32_t>(t.n_events)}};
    for (int32_t i = gaps.at[one.storage]; i < gaps.at[one.storage] + gaps.n[one.storage]; ++i)
      if (!stays[i]) beside.push_back({gaps.every[i].after + 1, gaps.every[i].before});
    int64_t most = 0;
    for (const Span& span : beside) most = std::max(most, used.most(span.first, span.end));
    if (most + n_bytes > capacity) continue;
    for (const Span& span : beside) used.add(span.first, span.end, n_bytes);
    resident[one.storage] = 1;
  }
}

// The scan in which exactly those gaps are stayed in: gaps.py's `laid_out`.
void lay_out(const Table& t, const Seconds& seconds, const uint8_t* fixed, const uint8_t* stays, int64_t capacity, Scan& scan) {
  const Gaps gaps(t);
  std::vector<int32_t> left;
  std::vector<int32_t> stay_of(gaps.every.size(), -1);
  for (int32_t s : gaps.order) {
    if (fixed[s]) continue;
    int32_t first = gaps.touches[s].front();
    if (t.is_input[s] && !t.is_tangent[s]) scan.loads.push_back({s, first, first, -1});
    for (int32_t i = gaps.at[s]; i < gaps.at[s] + gaps.n[s]; ++i) {
      if (stays[i]) continue;
      left.push_back(i);
      stay_of[i] = static_cast<int32_t>(scan.stays.size());
      scan.stays.push_back({s, first, gaps.every[i].after});
      first = gaps.every[i].before;
      scan.loads.push_back({s, first, first, -1});
    }
    scan.stays.push_back({s, first, t.returned[s] ? static_cast<int32_t>(t.n_events) - 1 : gaps.touches[s].back()});
  }
  std::stable_sort(scan.loads.begin(), scan.loads.end(), [](const Load& a, const Load& b) { return a.before < b.before; });
  std::stable_sort(left.begin(), left.end(), [&](int32_t a, int32_t b) {
    const Gap &x = gaps.every[a], &y = gaps.every[b];
    return x.after != y.after ? x.after < y.after : t.rank[x.storage] < t.rank[y.storage];
  });
  std::vector<int64_t> used(t.workspace_bytes, t.workspace_bytes + t.n_events);
  Spans spans(t.n_events);
  add_stays(t, scan, spans);
  spans.sum_into(used.data());
  const std::vector<double> before_s = seconds_before(t, seconds);
  const int64_t border = std::lower_bound(t.index, t.index + t.n_events, t.border) - t.index;
  std::vector<uint8_t> sent(t.n_storages, 0);
  double d2h_s = 0.0;
  for (int32_t i : left) {
    const auto& [s, after, before] = gaps.every[i];
    if (t.is_input[s] || sent[s]) continue;
    sent[s] = 1;
    d2h_s = std::max(d2h_s, before_s[after + 1]) + seconds.spill_s[s];
    const int64_t last = std::min<int64_t>(before, after < border ? border : t.n_events) - 1;
    int32_t until = after;
    while (until < last && before_s[until + 1] < d2h_s && used[until + 1] + t.n_bytes[s] <= capacity) used[++until] += t.n_bytes[s];
    scan.spills.push_back({s, after, until});
    scan.stays[stay_of[i]].last = until;
  }
}

thread_local std::string trouble;

template <class F, class R>
R guarded(R otherwise, F f) {
  trouble.clear();
  try {
    return f();
  } catch (const std::exception& error) {
    trouble = error.what();
    return otherwise;
  }
}

}  // namespace

extern "C" {

const char* fxo_trouble() { return trouble.c_str(); }

Scan* fxo_scan(const Table* t, const uint8_t* fixed, int64_t capacity, const uint8_t* kept, const uint8_t* swapped, int32_t to_the_end) {
  return guarded<>(static_cast<Scan*>(nullptr), [&] { return Spiller(*t, fixed, capacity, kept, swapped).run(to_the_end != 0); });
}

Scan* fxo_overlap(const Table* t, const Seconds* seconds, const Scan* found, int64_t capacity, double slack, int64_t* used) {
  return guarded<>(static_cast<Scan*>(nullptr), [&] {
    std::fill(used, used + t->n_events, int64_t{0});
    Spans stays(t->n_events);
    add_stays(*t, *found, stays);
    stays.sum_into(used);
    for (int64_t i = 0; i < t->n_events; ++i) used[i] = capacity - used[i] - t->workspace_bytes[i];
    Scan* result = new Scan(*found);
    pull_apart(*t, *seconds, *found, slack, used, *result);
    for (int64_t i = 0; i < t->n_events; ++i) used[i] = capacity - used[i];
    return result;
  });
}

Scan* fxo_bucket(const Table* t, const Scan* found, int64_t limit_bytes, double held_up, int64_t* used) {
  return guarded<>(static_cast<Scan*>(nullptr), [&] {
    const std::vector<int32_t> ends = ends_of(*t, *found);
    std::vector<int32_t> order(found->loads.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      const Load &x = found->loads[a], &y = found->loads[b];
      return x.start != y.start ? x.start < y.start : x.before < y.before;
    });
    std::vector<Copy> copies;
    for (int32_t i : order) {
      const Load& load = found->loads[i];
      const bool in_backward = t->index[load.start] > t->graph_border;
      int32_t kind = -1;
      if (ends[i] >= 0 && t->n_bytes[load.storage] && in_backward == (t->index[load.before] > t->graph_border) &&
          in_backward == (t->index[ends[i]] > t->graph_border))
        kind = t->tier[load.storage] * 2 + in_backward;
      copies.push_back({load.start, std::max(ends[i], 0) + 1, t->n_bytes[load.storage], kind});
    }
    Grouping grouping(*t, used, limit_bytes, held_up);
    grouping.run(copies);
    Scan* result = new Scan(*found);
    for (size_t bucket = 0; bucket < grouping.found.size(); ++bucket) {
      const int32_t start = copies[grouping.found[bucket][0]].start;
      for (int32_t i : grouping.found[bucket]) {
        result->loads[order[i]].start = start;
        result->loads[order[i]].bucket = static_cast<int32_t>(bucket);
      }
    }
    return result;
  });
}

// Buckets of several loads, in the order of the transfers: the first load's Storage and the bytes of all.
int64_t fxo_buckets(const Table* t, const Scan* found, int32_t* storages, int64_t* n_bytes) {
  int64_t n = 0;
  for (const auto& members : transfers_of(*found)) {
    if (members.size() == 1) continue;
    storages[n] = found->loads[members[0]].storage;
    n_bytes[n] = 0;
    for (int32_t member : members) n_bytes[n] += t->n_bytes[found->loads[member].storage];
    ++n;
  }
  return n;
}

double fxo_seconds(const Table* t, const Seconds* seconds, const Scan* found, const double* merged_s) {
  return guarded<>(-1.0, [&] { return Run(*t, *seconds, *found, merged_s).end_s(); });
}

// Storages that compute waits for, in the order it first does, and how long: how many.
int64_t fxo_stalls(const Table* t, const Seconds* seconds, const Scan* found, const double* merged_s, int32_t* storages, double* stalls_s) {
  return guarded<>(int64_t{-1}, [&] {
    Run run(*t, *seconds, *found, merged_s);
    run.end_s();
    for (size_t i = 0; i < run.stalled.size(); ++i) {
      storages[i] = run.stalled[i];
      stalls_s[i] = run.stall_s[run.stalled[i]];
    }
    return static_cast<int64_t>(run.stalled.size());
  });
}

Scan* fxo_just_in_time(const Table* t, const Seconds* seconds, const Scan* found, const double* merged_s, double ahead_s, double faster) {
  return guarded<>(static_cast<Scan*>(nullptr), [&] {
    Run run(*t, *seconds, *found, merged_s);
    const std::vector<int32_t> start = run.starts_just_in_time(ahead_s, faster);
    Scan* result = new Scan(*found);
    for (size_t number = 0; number < start.size(); ++number) {
      if (start[number] < 0) throw std::logic_error("a copy never starts");
      for (int32_t member : run.all()[number]) result->loads[member].start = start[number];
    }
    return result;
  });
}

int32_t fxo_used(const Table* t, const Scan* found, int64_t* used) {
  return guarded<>(int32_t{0}, [&] {
    Spans spans(t->n_events);
    add_stays(*t, *found, spans);
    for (const Load& one : found->loads) spans.add(one.start, one.before, t->n_bytes[one.storage]);
    for (const Sunk& one : found->sinks) spans.add(one.start + 1, one.until + 1, t->read_bytes[one.start]);
    std::vector<int32_t> ends;
    for (const auto& members : transfers_of(*found)) {
      if (members.size() == 1) continue;
      if (ends.empty()) ends = ends_of(*t, *found);
      const int64_t start = found->loads[members[0]].start;
      int64_t end = 0, n_bytes = 0;
      for (int32_t member : members) {
        if (ends[member] < 0) throw std::logic_error("a copy is in a bucket that may be in none");
        end = std::max<int64_t>(end, ends[member] + 1);
        n_bytes += padded(*t, t->n_bytes[found->loads[member].storage]);
        spans.add(start, ends[member] + 1, -t->n_bytes[found->loads[member].storage]);
      }
      spans.add(start, end, n_bytes);
    }
    std::copy(t->workspace_bytes, t->workspace_bytes + t->n_events, used);
    spans.sum_into(used);
    return int32_t{1};
  });
}

// `tables`: Storages that lookups read on the host and that may reside, each with the seconds that saves. The result is null where nothing is kept.
Scan* fxo_fill(const Table* t, const Seconds* seconds, const Scan* found, const int64_t* used, int64_t capacity, int64_t most, const uint8_t* may_reside,
               const uint8_t* must_leave, int64_t n_tables, const int32_t* tables, const double* saved_s, int32_t from_buckets, uint8_t* resident,
               int64_t* peak_bytes) {
  return guarded<>(static_cast<Scan*>(nullptr), [&] {
    Filler filler(*t, *seconds, *found, may_reside, must_leave, from_buckets != 0);
    filler.add_copies();
    for (int64_t i = 0; i < n_tables; ++i) filler.add_table(tables[i], saved_s[i]);
    return filler.filled(used, capacity, most, resident, peak_bytes);
  });
}

// What no scan needs less than beside the fixed inputs: Schedule.least_bytes. `spared` may be null.
int64_t fxo_least(const Table* t, const uint8_t* fixed, const uint8_t* kept, const int64_t* spared) {
  std::vector<int64_t> needed(t->workspace_bytes, t->workspace_bytes + t->n_events);
  std::vector<int32_t> last(t->n_storages, -1);
  Spans beside(t->n_events);
  const int64_t border = std::lower_bound(t->index, t->index + t->n_events, t->border) - t->index;
  for (int32_t i = 0; i < t->n_events; ++i)
    for (int32_t k = t->touches.at[i]; k < t->touches.at[i + 1]; ++k) {
      const int32_t s = t->touches.of[k];
      if (fixed[s]) continue;
      needed[i] += t->n_bytes[s];
      if (!kept[s] && !(t->returned[s] && i >= border)) continue;
      if (last[s] >= 0) beside.add(last[s] + 1, std::max(i, last[s] + 1), t->n_bytes[s]);
      last[s] = i;
    }
  for (int32_t s = 0; s < t->n_storages; ++s)
    if (t->returned[s] && last[s] >= 0) beside.add(last[s] + 1, t->n_events, t->n_bytes[s]);
  beside.sum_into(needed.data());
  int64_t least = std::numeric_limits<int64_t>::min();
  for (int64_t i = 0; i < t->n_events; ++i) least = std::max(least, needed[i] - (spared ? spared[i] : 0));
  return t->n_events ? least : 0;
}

int64_t fxo_gaps(const Table* t) { return static_cast<int64_t>(Gaps(*t).every.size()); }

void fxo_pack(const Table* t, const Seconds* seconds, const uint8_t* fixed, const uint8_t* kept, const uint8_t* swapped, const uint8_t* free,
              int64_t capacity, double power, uint8_t* stays, uint8_t* resident) {
  pack(*t, *seconds, fixed, kept, swapped, free, capacity, power, stays, resident);
}

Scan* fxo_lay_out(const Table* t, const Seconds* seconds, const uint8_t* fixed, const uint8_t* stays, int64_t capacity) {
  Scan* scan = new Scan;
  lay_out(*t, *seconds, fixed, stays, capacity, *scan);
  return scan;
}

Scan* fxo_make(int64_t n_loads, const int32_t* loads, int64_t n_spills, const int32_t* spills, int64_t n_sinks, const int32_t* sinks,
               int64_t n_stays, const int32_t* stays) {
  Scan* made = new Scan;
  for (int64_t i = 0; i < n_loads; ++i, loads += 4) made->loads.push_back({loads[0], loads[1], loads[2], loads[3]});
  for (int64_t i = 0; i < n_spills; ++i, spills += 3) made->spills.push_back({spills[0], spills[1], spills[2]});
  for (int64_t i = 0; i < n_sinks; ++i, sinks += 2) made->sinks.push_back({sinks[0], sinks[1]});
  for (int64_t i = 0; i < n_stays; ++i, stays += 3) made->stays.push_back({stays[0], stays[1], stays[2]});
  return made;
}

// Loads, spills, sinks, stays and what is live at the worst event: how many; peak bytes and event, shortfall bytes and event.
void fxo_describe(const Scan* scan, int64_t* counts, int64_t* numbers) {
  counts[0] = static_cast<int64_t>(scan->loads.size());
  counts[1] = static_cast<int64_t>(scan->spills.size());
  counts[2] = static_cast<int64_t>(scan->sinks.size());
  counts[3] = static_cast<int64_t>(scan->stays.size());
  counts[4] = static_cast<int64_t>(scan->live_at_worst.size());
  numbers[0] = scan->peak_bytes;
  numbers[1] = scan->peak_event;
  numbers[2] = scan->shortfall_bytes;
  numbers[3] = scan->worst;
}

void fxo_copy_out(const Scan* scan, int32_t* loads, int32_t* spills, int32_t* sinks, int32_t* stays, int32_t* live) {
  for (const Load& one : scan->loads) *loads++ = one.storage, *loads++ = one.before, *loads++ = one.start, *loads++ = one.bucket;
  for (const Spill& one : scan->spills) *spills++ = one.storage, *spills++ = one.after, *spills++ = one.until;
  for (const Sunk& one : scan->sinks) *sinks++ = one.start, *sinks++ = one.until;
  for (const Stay& one : scan->stays) *stays++ = one.storage, *stays++ = one.first, *stays++ = one.last;
  for (int32_t one : scan->live_at_worst) *live++ = one;
}

void fxo_drop(Scan* scan) { delete scan; }

}  // extern "C"
