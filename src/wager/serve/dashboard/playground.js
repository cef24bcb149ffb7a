// The playground: sends a message, shows the answer as it comes, and who guessed which part of it.

import { $, Refusal, ask, element, kindOf, number, write } from "./page.js";

const FIELDS = { temperature: "temperature", max_tokens: "tokens", messages: "prompt" }; // of requests: ids of inputs

let running = null; // aborts the request that runs
let last = null; // the piece of text at the end of the answer
let counts = null; // tokens of the answer, by drafter ("": the model)

// ---- the answer -----------------------------------------------------------------------------------------------------

function clear() {
  $("answer").replaceChildren();
  last = null;
  following = true;
  counts = new Map();
  ["problem", "outcome", "guessers"].forEach((id) => write(id, ""));
  Object.values(FIELDS).forEach((id) => $(id).removeAttribute("aria-invalid"));
}

function addText({ text, drafter }) {
  if (last && !drafter && last.tagName === "SPAN") last.append(text);
  else {
    last = drafter
      ? element("mark", { className: `g${kindOf(drafter)}`, title: `guessed by ${drafter}` }, text)
      : element("span", {}, text);
    $("answer").append(last);
  }
}

// Rejected guesses stand before the model's own token, which came in their place; a line break is a sign among them.
function addRound({ parts, rejected, rejected_tokens: count, drafter }) {
  const own = count && parts.at(-1)?.drafter === "" ? parts.at(-1) : null;
  (own ? parts.slice(0, -1) : parts).forEach(addText);
  if (count) {
    const shown = rejected.length ? rejected.join("").replaceAll("\n", "⏎") : `(${count})`;
    const title = `rejected guesses of ${drafter}` + (rejected.length ? "" : ", which the server shows with --show-rejected");
    last = element("del", { title }, shown);
    $("answer").append(last);
  }
  if (own) addText(own);
}

function add(speculation) {
  for (const name of speculation.drafted_by) counts.set(name, (counts.get(name) ?? 0) + 1);
  addRound(speculation);
  showGuessers();
  if (!drawn) drawn = requestAnimationFrame(follow);
}

// The end stays in sight until the reader scrolls back. Once a frame: it makes the browser lay out the page.
let following = true;
let scrolledTo = 0;
let drawn = 0;

function follow() {
  drawn = 0;
  if (following) $("answer").scrollTop = $("answer").scrollHeight;
}

$("answer").addEventListener("scroll", ({ target }) => {
  const atEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
  if (atEnd || target.scrollTop < scrolledTo) following = atEnd; // else the text has only grown meanwhile
  scrolledTo = target.scrollTop;
});

function showGuessers() {
  const drafters = [...counts.keys()].filter(Boolean);
  if ($("guessers").childElementCount === drafters.length + 1) return;
  $("guessers").replaceChildren(
    ...drafters.map((name) => element("mark", { className: `g${kindOf(name)}` }, `guessed by ${name}`)),
    element("span", {}, "unmarked: the model itself"),
  );
}

const total = () => [...counts.values()].reduce((sum, each) => sum + each, 0);
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;

function outcome(stats, end) {
  const guessed = [...counts].filter(([name]) => name).map(([name, count]) => `${number(count)} by ${name}`);
  const cut = end === "length" ? ", cut at the limit" : "";
  const speed = number(total() / (stats.prefill_s + stats.decode_s)),
    tau = number(stats.mean_acceptance_length, 2);
  return [
    `${plural(total(), "token")} in ${plural(stats.rounds, "pass")}${cut}: τ ${tau}, ${speed} tokens a second.`,
    guessed.length
      ? `Guessed: ${guessed.join(", ")}; ${number(stats.accepted)} of ${number(stats.drafted)} guesses accepted.`
      : "Nothing was guessed.",
    `Seed ${stats.seed}.`,
  ].join(" ");
}

// ---- the request ----------------------------------------------------------------------------------------------------

function figure(id, what) {
  const input = $(id);
  if (input.validity.badInput) throw new Refusal(`The ${what} is not a number.`, { param: what });
  return input.value === "" ? undefined : Number(input.value);
}

function body() {
  const content = $("prompt").value;
  if (!content.trim()) throw new Refusal("There is no message yet. Write one.", { param: "messages" });
  return {
    messages: [{ role: "user", content }],
    temperature: figure("temperature", "temperature"),
    max_tokens: figure("tokens", "max_tokens"),
    speculation: $("speculate").checked ? undefined : "off",
    speculation_stats: true,
    stream: true,
  };
}

// The events of a stream; a Refusal if it ends before it is complete.
async function* events(response) {
  const decoder = new TextDecoder(),
    reader = response.body.getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      return { done: true };
    });
    if (done) throw new Refusal("The connection was lost before the answer was complete.");
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      // a seed has more digits than a number holds
      yield JSON.parse(part.slice("data: ".length).replace(/"seed":(\d+)/, '"seed":"$1"'));
    }
  }
}

async function play(signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    signal,
    body: JSON.stringify(body()),
    headers: { "content-type": "application/json" },
  });
  let end = "";
  for await (const event of events(response)) {
    if (event.error) throw new Refusal(event.error.message);
    for (const choice of event.choices) {
      if (choice.speculation) add(choice.speculation);
      end = choice.finish_reason ?? end;
    }
    if (event.speculation) write("outcome", outcome(event.speculation.choices[0], end));
  }
}

function complain(error) {
  write("outcome", "");
  write("problem", error.message);
  const field = FIELDS[error.param];
  if (field) {
    $(field).setAttribute("aria-invalid", "true");
    $(field).focus();
  }
}

// Buttons stay focusable while they do nothing, so that the keyboard keeps its place.
function show(active) {
  $("send").setAttribute("aria-disabled", active);
  $("stop").setAttribute("aria-disabled", !active);
  $("answer").classList.toggle("growing", active);
}

async function send() {
  if (running) return;
  clear();
  running = new AbortController();
  show(true);
  write("outcome", "answering");
  try {
    await play(running.signal);
  } catch (error) {
    if (error.name === "AbortError") write("outcome", `Stopped after ${plural(total(), "token")}.`);
    else complain(error);
  }
  running = null;
  show(false);
}

$("play").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("rejected").addEventListener("change", () =>
  $("answer").classList.toggle("without-rejected", !$("rejected").checked),
);
