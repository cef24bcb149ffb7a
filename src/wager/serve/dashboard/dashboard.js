// Polls /live once a second while the page is seen, and shows what it says. No library, nothing from elsewhere.

import { $, Refusal, ask, kindOf, number, rows, useKey, write } from "./page.js";
import { History } from "./history.js";
import { ColumnChart, TimeChart, extent } from "./charts.js";
import "./playground.js";

const PERIOD = 1000,
  PATIENCE = 10000; // milliseconds

const history = new History();
const stage = (name) => ({ name, of: (each) => each.stages && (each.stages[name] ?? 0) });

const curves = {
  speed: new TimeChart($("speed-chart"), {
    title: "Throughput",
    unit: "tokens/s",
    least: 10,
    series: [{ name: "", of: (each) => each.speed }],
  }),
  batch: new TimeChart($("batch-chart"), {
    title: "Batch and queue",
    least: 4,
    series: [
      { name: "running", of: (each) => each.running },
      { name: "waiting", of: (each) => each.waiting },
    ],
  }),
  stages: new TimeChart($("stage-chart"), {
    title: "Step by stage, ms",
    digits: 2,
    least: 0.1,
    stacked: true,
    shown: 0.97,
    series: [stage("forward")],
  }),
  speedup: new TimeChart($("speedup-chart"), {
    title: "Speed-up over plain decoding",
    digits: 2,
    least: 1.5,
    reference: 1,
    series: [
      { name: "observed", of: (each) => each.observed },
      { name: "predicted", of: (each) => each.predicted },
    ],
  }),
  cost: new TimeChart($("cost-chart"), {
    title: "Cost of one more row",
    unit: "tokens",
    digits: 2,
    least: 0.1,
    series: [{ name: "", of: (each) => each.cost }],
  }),
  cache: new TimeChart($("cache-chart"), {
    title: "Cache in use",
    unit: "%",
    digits: 1,
    most: 100,
    series: [{ name: "", of: (each) => each.cache }],
  }),
};
const depths = new ColumnChart($("depth-chart"), {
  title: "Depth chosen, % of decisions",
  unit: "%",
  most: 100,
  first: 0,
  axis: "depth",
});
const acceptance = new ColumnChart($("acceptance-chart"), {
  title: "Guesses accepted by depth, %",
  unit: "%",
  most: 100,
  first: 1,
  axis: "depth",
});
const taus = new ColumnChart($("tau-chart"), {
  title: "Answers by tokens a pass, %",
  unit: "%",
  most: 100,
  first: 0,
  axis: "tokens",
});

function duration(seconds) {
  const minutes = Math.floor(seconds / 60),
    hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

function showFigures(now) {
  write("model", now.model);
  write("about", `version ${now.version}, up ${duration(now.uptime_s)}, drafters: ${now.drafters}`);
  write("speed", number(history.samples.at(-1)?.speed ?? 0));
  write("speedup", now.figures?.observed_speedup ? `${number(now.figures.observed_speedup, 2)} ×` : "–");
  write("running", number(now.running));
  write("places", `of ${number(now.max_running)}`);
  write("waiting", number(now.waiting));
  write("step", now.steps ? number(1000 * now.step_p50_s, 1) : "–");
  write("step99", now.steps ? `99 %: ${number(1000 * now.step_p99_s)}` : "");
  write("cache", `${number(100 * now.cache_usage, 1)} %`);
  write("policy", now.policy);
  write("alarm", Object.values(now.collapsed).join(" "));
  showGuesses("guesses-recent", "last 3 min", now.base);
  showGuesses("guesses-all", "since the start", null);
}

// What was drafted, what the policy admitted of it to be verified, and what of that was accepted: a line over all, and
// one for each of several drafters.
function showGuesses(id, period, before) {
  const { counted, tau } = history.guesses(before);
  const over = (name) => counted.reduce((sum, each) => sum + each[name], 0);
  const line = (first, { drafted, admitted, accepted }, last) => [
    first,
    number(drafted),
    number(admitted),
    admitted ? `${number(accepted)} (${number((100 * accepted) / admitted)} %)` : number(accepted),
    last,
  ];
  const all = { drafted: over("drafted"), admitted: over("admitted"), accepted: over("accepted") };
  const each = counted.length > 1 ? counted.filter(({ drafted }) => drafted) : [];
  rows($(id), [line(period, all, number(tau, 2)), ...each.map((one) => line(one.name, one, ""))]);
}

function showCharts(now) {
  const names = Object.keys(now.stage_seconds).sort((one, other) => now.stage_seconds[other] - now.stage_seconds[one]);
  if (curves.stages.series.length !== names.length && names.length) curves.stages.setSeries(names.map(stage));
  Object.values(curves).forEach((chart) => chart.draw(history.samples));
  const when = history.base ? "" : now.tokens ? "since the start" : "nothing yet";
  const { shares, mean } = history.depths;
  depths.draw(
    [{ name: "", kind: 1, values: shares }],
    [Number.isFinite(mean) ? `mean ${number(mean, 1)}` : "", when].filter(Boolean).join(", "),
  );
  const byDrafter = history.acceptance.map(({ name, shares }) => ({
    name,
    kind: kindOf(name),
    values: shares.map((share) => share && 100 * share),
  }));
  acceptance.draw(byDrafter, when);
  taus.draw([{ name: "", kind: 1, values: history.taus }], when);
  if ($("time-table").closest("details").open) showTables(shares, byDrafter);
}

function showTables(shares, byDrafter) {
  rows(
    $("time-table"),
    Object.values(curves).flatMap(({ title, series, digits, unit, samples }) =>
      series.map(({ name, of }) => {
        const { now, mean, least, most } = extent(samples, of);
        const full = [title, name].filter(Boolean).join(": ");
        return [
          unit && unit !== "%" ? `${full}, ${unit}` : full,
          ...[now, mean, least, most].map((value) => number(value, digits)),
        ];
      }),
    ),
  );
  const deepest = Math.max(0, shares.length - 1, ...byDrafter.map(({ values }) => values.length));
  rows(
    $("depth-table"),
    Array.from({ length: deepest + 1 }, (_, depth) => [
      String(depth),
      `${number(shares[depth] ?? 0)} %`,
      byDrafter
        .filter(({ values }) => Number.isFinite(values[depth - 1]))
        .map(({ name, values }) => `${name} ${number(values[depth - 1])} %`)
        .join(", ") || "–",
    ]),
  );
}

// ---- polling --------------------------------------------------------------------------------------------------------

let timer = 0;
let polling = null;

function state(kind, text) {
  $("status").dataset.state = kind;
  write("status", text);
}

async function read() {
  try {
    const now = await (await ask(`live?since=${history.since}`, { signal: AbortSignal.timeout(PATIENCE) })).json().catch(() => {
      throw new Refusal("The server does not answer.");
    });
    now.drafters.split(",").forEach(kindOf);
    history.add(now);
    showFigures(now);
    showCharts(now);
    showKeyForm(false);
    state("live", "live");
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    const wanted = error.status === 401;
    if (wanted) showKeyForm(true);
    state(wanted ? "wait" : "gone", wanted ? "The server asks for an API key." : error.message);
  }
}

// One reading at a time, and none while nobody sees the page.
function poll() {
  clearTimeout(timer);
  if (document.hidden) return null;
  polling ??= read().finally(() => {
    polling = null;
    timer = setTimeout(poll, PERIOD);
  });
  return polling;
}

// ---- the API key ----------------------------------------------------------------------------------------------------

function showKeyForm(shown) {
  const form = $("key-form");
  if (form.hidden !== shown) return;
  const inside = form.contains(document.activeElement);
  form.hidden = !shown;
  if (shown && document.activeElement === document.body) $("key").focus();
  if (!shown && inside) $("prompt").focus();
}

$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = $("key").value.trim();
  write("key-problem", "");
  if (!/^[!-~]+$/.test(given)) {
    write("key-problem", "A key is of printable ASCII characters without blanks.");
    return;
  }
  useKey(given);
  await polling; // which asks with the key before
  await poll();
  if (!$("key-form").hidden) write("key-problem", "The server does not know this key.");
});

document.addEventListener("visibilitychange", poll);
poll();
