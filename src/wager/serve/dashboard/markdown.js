// Markdown as elements. Every text keeps its place in the source, so that what is drawn can be marked by who guessed it.
// Read are headings, paragraphs, lists, quotes, rules, tables, fenced and inline code, strong and emphasised text;
// everything else stays as it is written. No text becomes markup.

import { element } from "./page.js";

const FENCE = /^\s*(```|~~~)/;
const HEADING = /^(#{1,6})\s+/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const QUOTE = /^\s*>\s?/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const INLINE = /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|(\*\*|__)(?=\S)([^]*?\S)\3|([*_])(?=\S)([^]*?\S)\5(?!\w)/g;

// The blocks of a text: {kind, from, to}; the last one may still grow.
export function blocks(text) {
  const found = [];
  let from = 0,
    fence = "";
  for (const line of text.split(/(?<=\n)/)) {
    const to = from + line.length,
      last = found.at(-1);
    if (fence) {
      last.to = to;
      if (line.trim() === fence) fence = "";
    } else if (FENCE.test(line)) {
      fence = line.trim().slice(0, 3);
      found.push({ kind: "code", from, to });
    } else {
      const kind = kindOf(line, last);
      if (kind === last?.kind && !["heading", "rule", "code"].includes(kind)) last.to = to;
      else found.push({ kind, from, to });
    }
    from = to;
  }
  return found.filter(({ kind }) => kind !== "blank");
}

function kindOf(line, last) {
  if (!line.trim()) return "blank";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line) || (last?.kind === "list" && /^\s/.test(line))) return "list";
  if (QUOTE.test(line)) return "quote";
  return ROW.test(line) ? "table" : "paragraph";
}

// A block as an element; `emit(parent, from, to)` appends the source's text between two places.
export function drawn(text, block, emit) {
  return { code, heading, rule, list, quote, table, paragraph }[block.kind](text, block, emit);
}

function* lines(text, { from, to }) {
  for (const line of text.slice(from, to).split(/(?<=\n)/)) {
    yield { line, from, to: from + line.trimEnd().length };
    from += line.length;
  }
}

function code(text, block, emit) {
  const all = [...lines(text, block)],
    closed = all.length > 1 && FENCE.test(all.at(-1).line);
  const inner = element("code"),
    end = closed ? all.at(-1).from : block.to;
  if (all.length > 1) emit(inner, all[1].from, end);
  return element("pre", { tabIndex: 0 }, inner);
}

function heading(text, block, emit) {
  const [{ line, from, to }] = lines(text, block);
  const [before, signs] = HEADING.exec(line);
  const made = element(`h${Math.min(6, signs.length + 2)}`); // those of the page are above
  inline(text, from + before.length, to, made, emit);
  return made;
}

const rule = () => element("hr");

// Items are indented by two columns a level.
function list(text, block, emit) {
  let top = null;
  const open = []; // {depth, list, item}
  for (const { line, from, to } of lines(text, block)) {
    const item = ITEM.exec(line);
    if (!item) {
      if (line.trim() && open.length) {
        open.at(-1).item.append(" ");
        inline(text, from + line.search(/\S/), to, open.at(-1).item, emit);
      }
      continue;
    }
    const depth = item[1].length >> 1,
      tag = /\d/.test(item[2]) ? "ol" : "ul";
    while (open.length && open.at(-1).depth > depth) open.pop();
    if (!open.length || open.at(-1).depth < depth) {
      const made = open.length ? element(tag) : (top ??= element(tag));
      if (tag === "ol" && !made.childElementCount) made.start = parseInt(item[2], 10);
      open.at(-1)?.item.append(made);
      open.push({ depth, list: made, item: null });
    }
    const level = open.at(-1);
    level.item = element("li");
    level.list.append(level.item);
    inline(text, from + item[0].length, to, level.item, emit);
  }
  return top;
}

function quote(text, block, emit) {
  const made = element("blockquote");
  for (const { line, from, to } of lines(text, block)) {
    inline(text, Math.min(to, from + QUOTE.exec(line)[0].length), to, made, emit);
    made.append(element("br"));
  }
  return made;
}

function table(text, block, emit) {
  const made = element("table");
  for (const { line, from } of lines(text, block)) {
    if (/^[\s|:-]+$/.test(line)) continue;
    const row = made.insertRow();
    for (const cell of line.matchAll(/\|\s*((?:[^|\\]|\\.)*?)\s*(?=\|)/g)) {
      const begin = from + cell.index + cell[0].indexOf(cell[1], 1);
      inline(text, begin, begin + cell[1].length, row.appendChild(element(made.rows.length > 1 ? "td" : "th")), emit);
    }
  }
  return element("div", { className: "wide", tabIndex: 0 }, made);
}

function paragraph(text, block, emit) {
  const made = element("p");
  inline(text, block.from, block.from + text.slice(block.from, block.to).trimEnd().length, made, emit);
  return made;
}

// Code, strong and emphasised text within a line.
function inline(text, from, to, parent, emit) {
  let at = from;
  for (const found of text.slice(from, to).matchAll(INLINE)) {
    const begin = from + found.index;
    emit(parent, at, begin);
    at = begin + found[0].length;
    const sign = (found[1] ?? found[3] ?? found[5]).length;
    const inner = parent.appendChild(element(found[1] ? "code" : found[3] ? "strong" : "em"));
    if (found[1]) emit(inner, begin + sign, at - sign);
    else inline(text, begin + sign, at - sign, inner, emit);
  }
  emit(parent, at, to);
}
