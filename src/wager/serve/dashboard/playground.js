// The playground: a conversation; answers as they come, in Markdown, and who guessed which part of them.

import { $, Refusal, ask, element, kindOf, number, write } from "./page.js";
import { blocks, drawn } from "./markdown.js";

const FIELDS = { temperature: "temperature", max_tokens: "tokens", messages: "prompt" }; // of requests: ids of inputs

let running = null; // aborts the request that runs
let turns = []; // of the conversation: messages of the user, and Answers
let counts = new Map(); // tokens of the conversation, by drafter ("": the model)

// ---- an answer ------------------------------------------------------------------------------------------------------

// Text that grows: `pieces` say who guessed it from where to where, `rejected` what was rejected before which place.
class Answer {
  role = "assistant";
  content = "";
  pieces = [];
  rejected = [];
  counts = new Map();
  drawn = []; // {from, to, kind, element} of the blocks on the page, and the place up to which they have the text

  constructor() {
    this.body = element("div", { className: "body" });
    this.copy = element("button", { type: "button", className: "copy", hidden: true }, "Copy");
    this.copy.addEventListener("click", () => copy(this));
    this.element = element("article", { className: "turn theirs" }, this.body, this.copy);
  }

  // Rejected guesses stand before the model's own token, which came in their place.
  add({ parts, rejected, rejected_tokens: count, drafter, drafted_by }) {
    for (const tokens of [counts, this.counts])
      for (const name of drafted_by) tokens.set(name, (tokens.get(name) ?? 0) + 1);
    const own = count && parts.at(-1)?.drafter === "" ? parts.at(-1) : null;
    (own ? parts.slice(0, -1) : parts).forEach((part) => this.append(part));
    if (count) {
      const text = rejected.length ? rejected.join("").replaceAll("\n", "⏎") : `(${count})`;
      const title = `rejected guesses of ${drafter}` + (rejected.length ? "" : ", which the server shows with --show-rejected");
      this.rejected.push({ at: this.content.length, text, title });
    }
    if (own) this.append(own);
  }

  append({ text, drafter }) {
    const from = this.content.length,
      last = this.pieces.at(-1);
    this.content += text;
    if (last && !drafter && !last.drafter) last.to = this.content.length;
    else this.pieces.push({ from, to: this.content.length, drafter });
  }

  // Blocks that have not changed stay on the page.
  draw() {
    const wanted = blocks(this.content);
    const same = ({ from, to, kind }, at) => {
      const old = this.drawn[at];
      return old && old.from === from && old.to === to && old.kind === kind;
    };
    const first = wanted.findIndex((block, at) => !same(block, at));
    const kept = first < 0 ? wanted.length : first;
    this.drawn.splice(kept).forEach((block) => block.element.remove());
    for (const block of wanted.slice(kept)) {
      this.place = this.drawn.at(-1)?.place ?? 0;
      const made = drawn(this.content, block, (parent, from, to) => this.emit(parent, from, to));
      this.drawn.push({ ...block, element: made, place: this.place });
      this.body.append(made);
    }
  }

  // The text between two places, marked by who guessed it; with the guesses that were rejected since the last text.
  emit(parent, from, to) {
    if (from >= to) return;
    const within = (at) => at >= this.place && at < to;
    const gone = this.rejected.filter(({ at }) => within(at));
    const cuts = this.pieces.filter((piece) => piece.to > from && piece.from < to);
    for (const { from: begin, to: end, drafter } of cuts) {
      let at = Math.max(from, begin);
      const stop = Math.min(to, end);
      while (gone.length && gone[0].at < stop) {
        const { at: where, text, title } = gone.shift();
        if (where > at) this.mark(parent, at, where, drafter);
        at = Math.max(at, where);
        parent.append(element("del", { title }, text));
      }
      if (at < stop) this.mark(parent, at, stop, drafter);
    }
    this.place = to;
  }

  mark(parent, from, to, drafter) {
    const text = this.content.slice(from, to);
    parent.append(
      drafter ? element("mark", { className: `g${kindOf(drafter)}`, title: `guessed by ${drafter}` }, text) : text,
    );
  }
}

async function copy(answer) {
  const said = await navigator.clipboard?.writeText(answer.content).then(
    () => "Copied",
    () => null,
  );
  write(answer.copy, said ?? "Not allowed here");
  setTimeout(() => write(answer.copy, "Copy"), 1500);
}

// ---- the conversation -----------------------------------------------------------------------------------------------

function clear() {
  ["problem", "outcome"].forEach((id) => write(id, ""));
  Object.values(FIELDS).forEach((id) => $(id).removeAttribute("aria-invalid"));
}

function forget() {
  running?.abort();
  turns = [];
  counts = new Map();
  clear();
  ["answer", "guessers"].forEach((id) => $(id).replaceChildren());
  $("prompt").focus();
}

function add(answer, speculation) {
  answer.add(speculation);
  showGuessers();
  if (!pending) pending = requestAnimationFrame(() => follow(answer));
}

// The end stays in sight until the reader scrolls back. Once a frame: it makes the browser lay out the page.
let following = true;
let scrolledTo = 0;
let pending = 0;

function follow(answer) {
  pending = 0;
  answer.draw();
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
    ...drafters.map((name) => element("mark", { className: `g${kindOf(name)}` }, name)),
    element("span", {}, "unmarked: the model"),
  );
}

const total = (tokens) => [...tokens.values()].reduce((sum, each) => sum + each, 0);
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;

function outcome(answer, stats, end) {
  const tokens = total(answer.counts);
  const guessed = [...answer.counts].filter(([name]) => name);
  const one = guessed.length === 1 ? ` by ${guessed[0][0]}` : "";
  const each = one ? "" : guessed.map(([name, count]) => `${number(count)} by ${name}`).join(", ");
  return [
    `${plural(tokens, "token")} in ${plural(stats.rounds, "pass")}${end === "length" ? ", cut off" : ""}`,
    `τ ${number(stats.mean_acceptance_length, 2)}`,
    `${number(tokens / (stats.prefill_s + stats.decode_s))} tokens/s`,
    `${number(stats.accepted)} of ${number(stats.drafted)} guesses${one} accepted${each && `: ${each}`}`,
    `seed ${stats.seed}`,
  ].join(" · ");
}

// ---- the request ----------------------------------------------------------------------------------------------------

function figure(id, what) {
  const input = $(id);
  if (input.validity.badInput) throw new Refusal(`The ${what} is not a number.`, { param: what });
  return input.value === "" ? undefined : Number(input.value);
}

function body() {
  return {
    messages: turns.filter(({ content }) => content).map(({ role, content }) => ({ role, content })),
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
      if (part.startsWith(":")) continue; // it waits for its first token
      // a seed has more digits than a number holds
      yield JSON.parse(part.slice("data: ".length).replace(/"seed":(\d+)/, '"seed":"$1"'));
    }
  }
}

async function play(answer, signal) {
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
      if (choice.speculation) add(answer, choice.speculation);
      end = choice.finish_reason ?? end;
    }
    if (event.speculation) write("outcome", outcome(answer, event.speculation.choices[0], end));
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
}

async function send() {
  if (running) return;
  clear();
  const content = $("prompt").value;
  if (!content.trim()) {
    complain(new Refusal("There is no message yet. Write one.", { param: "messages" }));
    return;
  }
  const asked = { role: "user", content, element: element("article", { className: "turn ours" }, content) };
  const answer = new Answer();
  const before = turns;
  turns = [...turns, asked, answer];
  $("answer").append(asked.element, answer.element);
  $("prompt").value = "";
  following = true;
  running = new AbortController();
  const { signal } = running;
  show(true);
  answer.element.classList.add("growing");
  write("outcome", "answering");
  try {
    await play(answer, signal);
  } catch (error) {
    if (error.name === "AbortError") write("outcome", `Stopped after ${plural(total(answer.counts), "token")}.`);
    else complain(error);
  }
  running = null;
  show(false);
  follow(answer);
  answer.element.classList.remove("growing");
  answer.copy.hidden = !answer.content;
  if (!answer.content && turns.includes(answer)) {
    // a message without an answer goes back to where it was written
    [asked, answer].forEach((turn) => turn.element.remove());
    turns = before;
    $("prompt").value ||= content;
  }
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
$("new").addEventListener("click", forget);
$("rejected").addEventListener("change", () =>
  $("answer").classList.toggle("without-rejected", !$("rejected").checked),
);
$("colours").addEventListener("change", () => $("playground").classList.toggle("plain", !$("colours").checked));
