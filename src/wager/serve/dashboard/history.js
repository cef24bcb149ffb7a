// What the server keeps of the last minutes (samples a second apart, and the counts at their beginning), and what has
// happened since then.

export const SPAN = 180; // seconds that the server keeps

const difference = (now, before) => now.map((count, at) => count - (before?.[at] ?? 0));
const sum = (counts) => counts.reduce((all, each) => all + each, 0);
const shares = (counts) => counts.map((count) => (100 * count) / Math.max(1, sum(counts)));

const NOTHING = { drafts: {}, tokens: 0, rounds: 0, planned_depths: [], requests_by_tau: [] };
const NO_DRAFTS = { drafted: 0, verified: 0, accepted: 0, verified_by_depth: [], accepted_by_length: [] };

export class History {
  samples = [];
  now = null;

  // From which sample on the server is asked; a server that was started anew has none so late, and gives all.
  get since() {
    return this.samples.at(-1)?.at ?? 0;
  }

  add(now) {
    const restarted = this.now && now.uptime_s < this.now.uptime_s;
    this.samples = [...(restarted ? [] : this.samples), ...now.samples].filter(({ at }) => at >= now.uptime_s - SPAN);
    this.now = now;
  }

  // The counts three minutes ago if anything was decoded since, else those at the start.
  get base() {
    return this.now.base && this.now.tokens > this.now.base.tokens ? this.now.base : null;
  }

  // By drafter what was drafted, admitted and accepted since a reading, and over all tokens from a pass.
  guesses(before) {
    const since = before ?? NOTHING;
    const counted = Object.entries(this.now.drafts).map(([name, counts]) => {
      const old = since.drafts[name] ?? NO_DRAFTS;
      return {
        name,
        drafted: counts.drafted - old.drafted,
        admitted: counts.verified - old.verified,
        accepted: counts.accepted - old.accepted,
      };
    });
    return { counted, tau: (this.now.tokens - since.tokens) / (this.now.rounds - since.rounds) };
  }

  // Of all draft decisions the percentage of each depth, and their mean.
  get depths() {
    const counts = difference(this.now.planned_depths, this.base?.planned_depths);
    return { shares: shares(counts), mean: sum(counts.map((count, depth) => count * depth)) / sum(counts) };
  }

  // Of all choices that ended the percentage by tokens a pass, rounded down.
  get taus() {
    return shares(difference(this.now.requests_by_tau, this.base?.requests_by_tau));
  }

  // By drafter and depth, of the drafts that were verified so deep, the share whose guess there was accepted.
  get acceptance() {
    const before = this.base?.drafts ?? {};
    return Object.entries(this.now.drafts)
      .map(([name, counts]) => {
        const old = before[name] ?? NO_DRAFTS;
        const verified = difference(counts.verified_by_depth, old.verified_by_depth);
        const accepted = difference(counts.accepted_by_length, old.accepted_by_length);
        const found = verified.map((_, depth) => sum(accepted.slice(depth)) / sum(verified.slice(depth))).slice(1);
        return { name, shares: found.map((share) => (Number.isFinite(share) ? share : null)) };
      })
      .filter(({ shares: found }) => found.some((share) => share !== null));
  }
}
