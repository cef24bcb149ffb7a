"use strict";
// Polls /live once a second and draws it; the playground reads a streamed answer. No library, nothing from elsewhere.

const $ = (id) => document.getElementById(id);
const SHOWN = 120; // seconds of history
const history_ = [];
let last = null;
let key = sessionStorage.getItem("key") || "";
const headers = () => (key ? { authorization: `Bearer ${key}` } : {});
const number = (value, digits = 0) => (Number.isFinite(value) ? value.toFixed(digits) : "–");

function draw(svg, values, unit) {
  const most = Math.max(1, ...values);
  const x = (at) => 36 + ((at + SHOWN - values.length) * 360) / (SHOWN - 1);
  const y = (value) => 108 - (value / most) * 98;
  const points = values.map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const grid = [0, 0.5, 1].map((share) => `<line class="grid" x1="36" x2="396" y1="${y(share * most)}" y2="${y(share * most)}"/>` +
    `<text x="32" y="${y(share * most) + 4}" text-anchor="end">${number(share * most, most < 8 ? 1 : 0)}</text>`).join("");
  svg.innerHTML = `${grid}<polyline class="line" points="${points}"/>`;
  const now = values.length ? values[values.length - 1] : 0;
  svg.setAttribute("aria-label", `${unit}: ${number(now, 1)} now, ${number(most, 1)} at most in two minutes`);
}

function rows(body, cells) {
  body.replaceChildren(...cells.map((row) => {
    const line = document.createElement("tr");
    row.forEach((text, at) => {
      const cell = document.createElement(at ? "td" : "th");
      if (!at) cell.scope = "row";
      cell.textContent = text;
      line.append(cell);
    });
    return line;
  }));
}

function stages(now, before) {
  const steps = now.steps - (before ? before.steps : 0) || 1;
  const names = Object.keys(now.stage_seconds);
  const spent = names.map((name) => now.stage_seconds[name] - (before ? before.stage_seconds[name] || 0 : 0));
  const total = spent.reduce((sum, each) => sum + each, 0);
  if (!total) return;
  rows($("stages"), names.map((name, at) => [name, `${number((100 * spent[at]) / total, 1)} %`, number((1000 * spent[at]) / steps, 3)]));
  $("stage-bar").replaceChildren(...names.map((name, at) => {
    const part = document.createElement("span");
    part.className = `g${(at % 6) + 1}`;
    part.style.flexGrow = spent[at] / total;
    part.title = name;
    return part;
  }));
  $("stage-bar").setAttribute("aria-label", names.map((name, at) => `${name} ${number((100 * spent[at]) / total)} percent`).join(", "));
}

// Of drafts that reached a depth, how many had their guess there accepted.
function byDepth(counts) {
  const least = (lengths, depth) => lengths.slice(depth).reduce((sum, each) => sum + each, 0);
  const depths = [];
  for (let depth = 1; depth < counts.verified_by_length.length; depth++) {
    const verified = least(counts.verified_by_length, depth);
    if (verified) depths.push(`${depth}: ${number((100 * least(counts.accepted_by_length, depth)) / verified)} %`);
  }
  return depths.join("  ");
}

function show(now) {
  const seconds = last ? now.uptime_s - last.uptime_s : 0;
  const speed = seconds ? (now.tokens - last.tokens) / seconds : 0;
  history_.push({ speed, running: now.running });
  if (history_.length > SHOWN) history_.shift();
  const drafts = Object.values(now.drafts);
  const sum = (name) => drafts.reduce((total, each) => total + each[name], 0);
  $("model").textContent = now.model;
  $("speed").textContent = number(speed);
  $("running").textContent = now.running;
  $("waiting").textContent = now.waiting;
  $("tau").textContent = number(now.tokens / (now.tokens - sum("accepted")), 2);
  $("accepted").textContent = sum("verified") ? `${number((100 * sum("accepted")) / sum("verified"))} %` : "–";
  $("step").textContent = `${number(1000 * now.step_p50_s, 1)} ms`;
  $("step99").textContent = `${number(1000 * now.step_p99_s, 1)} ms`;
  $("cache").textContent = `${number(100 * now.cache_usage)} %`;
  draw($("speed-chart"), history_.map((each) => each.speed), "tokens a second");
  draw($("batch-chart"), history_.map((each) => each.running), "running sequences");
  stages(now, last && now.steps > last.steps ? last : null);
  rows($("depths"), Object.entries(now.drafts).map(([name, counts]) => [name, counts.drafts, byDepth(counts)]));
  const most = Math.max(1, ...now.planned_depths);
  $("planned").replaceChildren(...now.planned_depths.map((count, depth) => {
    const column = document.createElement("div");
    const bar = document.createElement("i");
    bar.style.height = `${(70 * count) / most}%`;
    column.append(bar, String(depth));
    column.title = `${count} decisions`;
    return column;
  }));
  $("planned").setAttribute("aria-label", now.planned_depths.map((count, depth) => `depth ${depth}: ${count}`).join(", ") || "no drafts yet");
  if ($("policy").textContent !== now.policy) $("policy").textContent = now.policy;
  say(`running for ${number(now.uptime_s)} s, drafters: ${now.drafters}`);
  last = now;
}

function say(text) {
  const at = $("status");
  const kind = text.replace(/[0-9]+/g, "");
  at.setAttribute("aria-live", at.dataset.kind === kind ? "off" : "polite"); // a clock need not be read out
  at.dataset.kind = kind;
  at.textContent = text;
}

async function poll() {
  try {
    const response = await fetch("live", { headers: headers() });
    $("key-form").hidden = response.status !== 401;
    if (response.status === 401) say("an API key is needed");
    else if (!response.ok) say((await response.json()).error.message);
    else show(await response.json());
  } catch (error) {
    say("the server does not answer");
  }
  setTimeout(poll, 1000);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("key", key);
});

// ---- playground ------------------------------------------------------------------------------------------------------

let running = null;
const colours = new Map();

function colour(drafter) {
  if (!drafter) return "";
  if (!colours.has(drafter)) {
    colours.set(drafter, `g${(colours.size % 6) + 1}`);
    $("legend").replaceChildren(...[...colours].map(([name, style]) => {
      const item = document.createElement("span");
      item.className = style;
      item.textContent = `guessed by ${name}`;
      return item;
    }), "no colour: the model itself");
  }
  return colours.get(drafter);
}

function add(speculation) {
  const answer = $("answer");
  for (const part of speculation.parts) {
    const piece = document.createElement(part.drafter ? "mark" : "span");
    piece.className = colour(part.drafter);
    piece.textContent = part.text;
    if (part.drafter) piece.title = `guessed by ${part.drafter}`;
    answer.append(piece);
  }
  if (speculation.rejected.length) {
    const wrong = document.createElement("del");
    wrong.textContent = speculation.rejected.join("");
    wrong.title = `rejected guesses of ${speculation.drafter}`;
    answer.append(wrong);
  }
}

async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

async function play() {
  const body = {
    messages: [{ role: "user", content: $("prompt").value }],
    temperature: Number($("temperature").value), max_tokens: Number($("tokens").value),
    stream: true, speculation_stats: true,
  };
  if (!$("speculate").checked) body.speculation = "off";
  running = new AbortController();
  const response = await fetch("v1/chat/completions", {
    method: "POST", signal: running.signal, body: JSON.stringify(body),
    headers: { "content-type": "application/json", ...headers() },
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) if (choice.speculation) add(choice.speculation);
    if (event.speculation) {
      const [stats] = event.speculation.choices;
      const tokens = Math.round(stats.rounds * stats.mean_acceptance_length);
      $("outcome").textContent = `${tokens} tokens in ${stats.rounds} passes, τ ${number(stats.mean_acceptance_length, 2)}, ` +
        `${number(tokens / stats.decode_s)} tokens a second; ${stats.accepted} of ${stats.drafted} guesses accepted; seed ${stats.seed}`;
    }
  }
}

$("play").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  $("answer").replaceChildren();
  $("outcome").textContent = "";
  $("send").disabled = true;
  $("stop").disabled = false;
  try {
    await play();
  } catch (error) {
    $("outcome").textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
});
$("stop").addEventListener("click", () => running && running.abort());
$("rejected").addEventListener("change", () => $("answer").classList.toggle("without-rejected", !$("rejected").checked));
$("answer").classList.add("without-rejected");
poll();
