// A step with some of its values computed again, on numbers: what passes/recompute.py inserts, and what liveness.py, spill.py and donation.py say
// of the graph then. Those modules state the rules; derived.py makes the numbers of the graph and tells when they do for it.
//
// A node is its place in the graph before, and its clone that and `n_nodes`; a Storage its place in the order of definition before, and its clone's
// that and `n_storages`. What is given is in numbers of the new order of definition.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Rows {
  const int32_t* at;
  const int32_t* of;
};

// What a node is.
constexpr uint8_t kCall = 1, kAlways = 2, kView = 4, kElement = 8, kEvent = 16, kDraws = 32;
// Which Storages of its tuple an element looks into, where it is not the one of that place.
constexpr int32_t kAll = -1, kNone = -2;

struct Made {
  bool draws = false;
  std::vector<int64_t> index, own_bytes, workspace_bytes, read_bytes, next_use;
  std::vector<int32_t> rank, made_by, nodes, storages;
  std::vector<int32_t> makes_at{0}, makes, every_at{0}, every, reads_at{0}, reads, touches_at{0}, touches, leaves_at{0}, leaves, uses_at{0}, uses;
  std::vector<uint8_t> returned;
};

}  // namespace

extern "C" {

// A graph in which nothing is computed again; its last node is the output. `operands`: the nodes each node reads; `seen`: those whose bytes an
// event reads; `makes`: Storages; `givers`: operands whose place the node's result takes if nothing else reads them, which spares its
// `workspace_bytes`; `source`: what a view or an element looks into; `results`: what the graph returns. Of a Storage `counts` says whether events
// name it. `rank`: of the names of Storages and then of their clones', among all `n_ranks`.
struct Base {
  int64_t n_nodes, border, n_storages, n_ranks, never, n_results;
  Rows operands, seen, makes, givers;
  const int32_t *source, *element, *results;
  const uint8_t* flags;
  const int64_t *workspace_bytes, *n_bytes;
  const int32_t* rank;
  const uint8_t *counts, *is_input, *is_tangent, *fixed;
};

}  // extern "C"

namespace {

class Deriver {
 public:
  Deriver(const Base& base, const uint8_t* again)
      : b(base), output(static_cast<int32_t>(b.n_nodes) - 1), cloned(b.n_nodes, 0), done(b.n_nodes, 0), next(2 * b.n_nodes), previous(2 * b.n_nodes) {
    for (int32_t n = 0; n < b.border; ++n) cloned[n] = (b.flags[n] & kCall) && ((b.flags[n] & kAlways) || again[n]);
  }

  Made* run() {
    insert();
    if (!made->draws) {
      look();
      tell_events();
      tell_touches();
    }
    return made.release();
  }

 private:
  const Base& b;
  const int32_t output;
  std::vector<uint8_t> cloned, done;
  std::vector<int32_t> next, previous, work, of_at, of_n, pool, n_users, number;
  std::vector<int64_t> defined_at;
  std::unique_ptr<Made> made = std::make_unique<Made>();

  int32_t origin(int32_t node) const { return node < b.n_nodes ? node : node - static_cast<int32_t>(b.n_nodes); }
  bool is(int32_t node, uint8_t what) const { return b.flags[origin(node)] & what; }
  // What a node reads where its origin reads `operand`.
  int32_t read_by(int32_t node, int32_t operand) const {
    const bool again = node > b.border && node != output && cloned[operand];
    return again ? operand + static_cast<int32_t>(b.n_nodes) : operand;
  }

  template <class F>
  void each(const Rows& rows, int32_t row, F f) const {
    for (int32_t i = rows.at[row]; i < rows.at[row + 1]; ++i) f(rows.of[i]);
  }

  void insert() {
    for (int32_t n = 0; n <= output; ++n) {
      previous[n] = n - 1;
      next[n] = n < output ? n + 1 : -1;
    }
    for (int32_t n = static_cast<int32_t>(b.border) + 1; n < output && !made->draws; ++n)
      each(b.operands, n, [&](int32_t operand) {
        if (cloned[operand]) materialize(operand, n);
      });
  }

  void materialize(int32_t wanted, int32_t before) {
    work.assign(1, wanted);
    while (!work.empty()) {
      const int32_t node = work.back();
      if (done[node]) {
        work.pop_back();
        continue;
      }
      const size_t n = work.size();
      each(b.operands, node, [&](int32_t operand) {
        if (cloned[operand] && !done[operand]) work.push_back(operand);
      });
      if (work.size() > n) continue;
      clone(node, before);
      work.pop_back();
    }
  }

  void clone(int32_t node, int32_t before) {
    made->draws |= is(node, kDraws);
    if (is(node, kElement)) {
      if (!done[b.source[node]]) throw std::logic_error("an element is computed again and its tuple is not");
      before = next[b.source[node] + b.n_nodes];
      while (is(before, kElement)) before = next[before];
    }
    const int32_t again = node + static_cast<int32_t>(b.n_nodes);
    previous[again] = previous[before];
    next[again] = before;
    next[previous[before]] = again;
    previous[before] = again;
    done[node] = 1;
  }

  // The Storages that each node's value aliases, who reads it, and the order in which Storages are defined.
  void look() {
    of_at.assign(2 * b.n_nodes, 0);
    of_n.assign(2 * b.n_nodes, 0);
    n_users.assign(2 * b.n_nodes, 0);
    number.assign(2 * b.n_storages, -1);
    for (int32_t node = 0; node >= 0; node = next[node]) {
      const int32_t from = origin(node);
      each(b.operands, from, [&](int32_t operand) { ++n_users[read_by(node, operand)]; });
      if (is(node, kView | kElement)) {
        const int32_t source = read_by(node, b.source[from]), element = b.element[from];
        if (is(node, kElement) && element != kAll) {
          of_at[node] = of_at[source] + std::max(element, 0);
          of_n[node] = element != kNone && of_n[source] ? 1 : 0;
        } else {
          of_at[node] = of_at[source];
          of_n[node] = of_n[source];
        }
        continue;
      }
      of_at[node] = static_cast<int32_t>(pool.size());
      each(b.makes, from, [&](int32_t storage) {
        const int32_t s = node < b.n_nodes ? storage : storage + static_cast<int32_t>(b.n_storages);
        number[s] = static_cast<int32_t>(made->storages.size());
        made->storages.push_back(s);
        pool.push_back(s);
      });
      of_n[node] = static_cast<int32_t>(pool.size()) - of_at[node];
    }
    std::vector<int32_t> ranks(b.n_ranks, 0);
    for (int32_t s : made->storages) ranks[b.rank[s]] = 1;
    for (int32_t i = 0, n = 0; i < b.n_ranks; ++i) n += std::exchange(ranks[i], n);
    for (int32_t s : made->storages) made->rank.push_back(ranks[b.rank[s]]);
  }

  int32_t before(int32_t storage) const { return storage < b.n_storages ? storage : storage - static_cast<int32_t>(b.n_storages); }
  int64_t n_bytes(int32_t number) const { return b.n_bytes[before(made->storages[number])]; }

  int64_t workspace_bytes(int32_t node) const {
    const int32_t from = origin(node);
    if (b.givers.at[from] == b.givers.at[from + 1]) return b.workspace_bytes[from];
    bool takes_a_place = false;
    each(b.givers, from, [&](int32_t operand) { takes_a_place |= n_users[read_by(node, operand)] == 1; });
    return takes_a_place ? b.workspace_bytes[from] : 0;
  }

  void tell_events() {
    std::vector<int32_t> seen(2 * b.n_storages, -1);
    made->made_by.assign(made->storages.size(), -1);
    int64_t index = 0;
    for (int32_t node = 0; node >= 0; node = next[node], ++index) {
      if (!is(node, kEvent)) continue;
      const int32_t from = origin(node), event = static_cast<int32_t>(made->nodes.size());
      int64_t own_bytes = workspace_bytes(node), read_bytes = 0;
      made->workspace_bytes.push_back(own_bytes);
      each(b.seen, from, [&](int32_t operand) {
        const int32_t value = read_by(node, operand);
        for (int32_t i = of_at[value]; i < of_at[value] + of_n[value]; ++i) {
          const int32_t s = pool[i];
          if (!b.counts[before(s)] || seen[s] == event) continue;
          seen[s] = event;
          made->every.push_back(number[s]);
          if (!b.fixed[before(s)]) made->reads.push_back(number[s]);
          read_bytes += b.n_bytes[before(s)];
        }
      });
      auto make = [&](int32_t s) {
        made->makes.push_back(number[s]);
        own_bytes += b.n_bytes[before(s)];
      };
      if (!is(node, kView | kElement))
        for (int32_t i = of_at[node]; i < of_at[node] + of_n[node]; ++i) {
          if (!b.is_input[before(pool[i])]) made->made_by[number[pool[i]]] = event;
          if (b.counts[before(pool[i])]) make(pool[i]);
        }
      if (node == b.border)
        for (int32_t s = 0; s < b.n_storages; ++s)
          if (b.is_tangent[s]) make(s);
      made->nodes.push_back(from);
      made->index.push_back(index);
      made->own_bytes.push_back(own_bytes);
      made->read_bytes.push_back(read_bytes);
      made->makes_at.push_back(static_cast<int32_t>(made->makes.size()));
      made->every_at.push_back(static_cast<int32_t>(made->every.size()));
      made->reads_at.push_back(static_cast<int32_t>(made->reads.size()));
    }
    made->returned.assign(made->storages.size(), 0);
    for (int64_t i = 0; i < b.n_results; ++i)
      for (int32_t k = 0; k < of_n[b.results[i]]; ++k) {
        const int32_t s = pool[of_at[b.results[i]] + k];
        if (!b.is_input[before(s)]) made->returned[number[s]] = 1;
      }
    for (int32_t s = 0; s < b.n_storages; ++s)
      if (b.is_tangent[s]) made->returned[number[s]] = 1;
  }

  void tell_touches() {
    const int32_t n_events = static_cast<int32_t>(made->nodes.size()), n_storages = static_cast<int32_t>(made->storages.size());
    for (int32_t i = 0; i < n_events; ++i) {
      made->touches.insert(made->touches.end(), made->reads.begin() + made->reads_at[i], made->reads.begin() + made->reads_at[i + 1]);
      made->touches.insert(made->touches.end(), made->makes.begin() + made->makes_at[i], made->makes.begin() + made->makes_at[i + 1]);
      made->touches_at.push_back(static_cast<int32_t>(made->touches.size()));
    }
    made->next_use.resize(made->touches.size());
    std::vector<int64_t> upcoming(n_storages, b.never);
    std::vector<int32_t> n_uses(n_storages, 0);
    for (int32_t i = n_events - 1; i >= 0; --i) {
      for (int32_t k = made->touches_at[i]; k < made->touches_at[i + 1]; ++k) made->next_use[k] = upcoming[made->touches[k]];
      for (int32_t k = made->reads_at[i]; k < made->reads_at[i + 1]; ++k) {
        upcoming[made->reads[k]] = made->index[i];
        ++n_uses[made->reads[k]];
      }
    }
    for (int32_t i = 0; i < n_events; ++i) {
      for (int32_t k = made->touches_at[i]; k < made->touches_at[i + 1]; ++k)
        if (made->next_use[k] == b.never && !made->returned[made->touches[k]]) made->leaves.push_back(made->touches[k]);
      made->leaves_at.push_back(static_cast<int32_t>(made->leaves.size()));
    }
    for (int32_t s = 0; s < n_storages; ++s) made->uses_at.push_back(made->uses_at.back() + n_uses[s]);
    made->uses.resize(made->uses_at.back());
    std::vector<int32_t> at(made->uses_at.begin(), made->uses_at.end() - 1);
    for (int32_t i = 0; i < n_events; ++i)
      for (int32_t k = made->reads_at[i]; k < made->reads_at[i + 1]; ++k) made->uses[at[made->reads[k]]++] = i;
  }
};

struct Column {
  const void* data;
  int64_t n_bytes;
};

template <class T>
Column column(const std::vector<T>& numbers) {
  return {numbers.data(), static_cast<int64_t>(numbers.size() * sizeof(T))};
}

thread_local std::string trouble;

}  // namespace

extern "C" {

const char* fxo_derive_trouble() { return trouble.c_str(); }

// The graph with the nodes `again` computed again where backward reads them; null where that cannot be told. `columns`: where its numbers lie, as
// derived.py names them, until they are dropped; none where something draws that is computed again.
Made* fxo_derive(const Base* base, const uint8_t* again, Column* columns) {
  trouble.clear();
  try {
    Made* made = Deriver(*base, again).run();
    if (made->draws) return made;
    for (const Column& one :
         {column(made->index), column(made->own_bytes), column(made->workspace_bytes), column(made->read_bytes), column(made->next_use),
          column(made->rank), column(made->made_by), column(made->nodes), column(made->storages), column(made->returned), column(made->makes_at),
          column(made->makes), column(made->every_at), column(made->every), column(made->reads_at), column(made->reads), column(made->touches_at),
          column(made->touches), column(made->leaves_at), column(made->leaves), column(made->uses_at), column(made->uses)})
      *columns++ = one;
    return made;
  } catch (const std::exception& error) {
    trouble = error.what();
    return nullptr;
  }
}

int32_t fxo_derive_draws(const Made* made) { return made->draws; }

void fxo_derive_drop(Made* made) { delete made; }

}  // extern "C"
