// What the other scripts share: elements, numbers as text, the API key, colours of drafters.

export const $ = (id) => document.getElementById(id);

// An element with properties and children; texts become text nodes, never markup.
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Text is only set where it differs, so that selections stay and nothing is announced twice.
export function write(id, text) {
  const place = typeof id === "string" ? $(id) : id;
  if (place.textContent !== text) place.textContent = text;
}

export function number(value, digits = 0) {
  if (!Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function rows(body, cells) {
  body.replaceChildren(
    ...cells.map(([first, ...others]) =>
      element("tr", {}, element("th", { scope: "row" }, first), ...others.map((text) => element("td", {}, text))),
    ),
  );
}

// ---- the API key, kept for this tab ---------------------------------------------------------------------------------

let key = sessionStorage.getItem("key") || "";

export const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

export function useKey(given) {
  key = given;
  sessionStorage.setItem("key", key);
}

// ---- who is drawn how: the first drafter is kind 1 ------------------------------------------------------------------

const KINDS = 6;
const kinds = new Map();

export function kindOf(drafter) {
  if (!kinds.has(drafter)) kinds.set(drafter, (kinds.size % KINDS) + 1);
  return kinds.get(drafter);
}

// ---- errors as sentences --------------------------------------------------------------------------------------------

export class Refusal extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    Object.assign(this, { status, param });
  }
}

// The response if it is one of success; otherwise a Refusal with the server's own sentence.
export async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
  } catch (error) {
    if (error.name === "AbortError") throw error; // by the user
    throw new Refusal("The server does not answer.");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw new Refusal(error?.message ?? `The server answered with status ${response.status}.`, {
    status: response.status,
    param: error?.param,
  });
}
