// A part of Markdown as elements: paragraphs, headings, lists, quotes, code, emphasis. Everything else stays text,
// links too, so that the reader sees the target. The time is linear for any text.

import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})\s*$/;
const MAX_DEPTH = 8; // of lists and quotes; what is deeper is text

/** The view of a text that grows; only changed blocks are rendered again. */
export class MarkdownView {
  #sources = [];

  /** @param {Element} container That holds nothing else. */
  constructor(container) {
    this.container = container;
  }

  update(text) {
    const found = blocks(text);
    const isSame = (block, place) => this.#sources[place] === block.source;
    const changed = found.findIndex((block, place) => !isSame(block, place));
    const first = changed < 0 ? found.length : changed;
    while (this.container.children.length > first) this.container.lastElementChild.remove();
    this.container.append(...found.slice(first).map((block) => block.make()));
    this.#sources = found.map((block) => block.source);
  }
}

/** All of a text at once. */
export const render = (text, depth = 0) => blocks(text, depth).map((block) => block.make());

/** The blocks of a text: `source` is all that one depends on, `make()` its element. */
function blocks(text, depth = 0) {
  const lines = text.split("\n");
  const found = [];
  let start = 0;
  while (start < lines.length) {
    if (!lines[start].trim()) {
      start += 1;
      continue;
    }
    const [end, make] = block(lines, start, depth);
    found.push({ source: lines.slice(start, end).join("\n"), make });
    start = end;
  }
  return found;
}

/** The line after a block, and a function that renders the block. */
function block(lines, start, depth) {
  const line = lines[start];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, start, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(heading[1].length + 2, 6); // h1 and h2 are the page's own
    return [start + 1, () => element(`h${level}`, {}, ...inline(heading[2]))];
  }
  if (RULE.test(line)) return [start + 1, () => element("hr")];
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    const end = endOf(lines, start, (next) => QUOTE.test(next));
    const inner = lines.slice(start, end).map((one) => QUOTE.exec(one)[1]);
    return [end, () => element("blockquote", {}, ...render(inner.join("\n"), depth + 1))];
  }
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, start, depth);
  const isText = (next) => next.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((other) => other.test(next));
  const end = endOf(lines, start, isText);
  return [end, () => element("p", {}, ...inline(lines.slice(start, end).join("\n")))];
}

/** The first line after `start` that does not belong to it. */
function endOf(lines, start, belongs) {
  let end = start + 1;
  while (end < lines.length && belongs(lines[end])) end += 1;
  return end;
}

/** Code between fences; where the second one has not come yet, all that follows. */
function code(lines, start, [, mark, info]) {
  const [language] = info.trim().split(/\s/);
  const isClosing = (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  const end = endOf(lines, start, (line) => !isClosing(line));
  const text = lines.slice(start + 1, end).join("\n");
  const label = language ? `Code in ${language}` : "Code";
  // It scrolls, so the keyboard has to reach it.
  const make = () => element("pre", { tabIndex: 0, role: "group", "aria-label": label }, element("code", {}, text));
  return [end + 1, make];
}

/** Items of one kind, with what is indented below each. */
function list(lines, start, depth) {
  const [, margin, mark] = ITEM.exec(lines[start]);
  const isNumbered = /\d/.test(mark);
  const items = []; // the lines of each, without its mark and indentation
  let at = start;
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    const item = ITEM.exec(line);
    if (item && item[1].length <= margin.length) {
      if (/\d/.test(item[2]) !== isNumbered || item[1].length < margin.length) break;
      items.push([item[3]]);
    } else if (line.trim()) {
      const indent = line.length - line.trimStart().length;
      if (indent <= margin.length) break;
      items.at(-1).push(line.slice(Math.min(indent, margin.length + 2)));
    } else if (at + 1 < lines.length && (ITEM.test(lines[at + 1]) || /^\s{2,}\S/.test(lines[at + 1]))) {
      items.at(-1).push("");
    } else break;
  }
  const first = isNumbered ? { start: parseInt(mark, 10) } : {};
  const make = () =>
    element(isNumbered ? "ol" : "ul", first, ...items.map((item) => element("li", {}, ...content(item, depth + 1))));
  return [at, make];
}

/** What an item holds: its own line is no paragraph unless there are several. */
function content(lines, depth) {
  const made = render(lines.join("\n"), depth);
  if (made[0]?.tagName === "P" && !made.slice(1).some((one) => one.tagName === "P")) {
    return [...made[0].childNodes, ...made.slice(1)];
  }
  return made;
}

/** Text with code, emphasis and escapes. */
function inline(text) {
  const special = /[\\`*_]/g;
  const missing = new Set(); // marks that do not come any more
  const nodes = [];
  let plain = "";
  let at = 0;
  for (let found = special.exec(text); found; found = special.exec(text)) {
    const start = found.index;
    plain += text.slice(at, start);
    at = start;
    const mark = markAt(text, start);
    const end = missing.has(mark) ? -1 : closing(text, start + mark.length, mark);
    if (end < 0) missing.add(mark);
    const inner = text.slice(start + mark.length, end);
    if (mark === "\\") {
      const escaped = /[!-/:-@[-`{-~]/.test(text[start + 1] ?? "");
      plain += escaped ? text[start + 1] : mark;
      at += escaped ? 2 : 1;
    } else if (end >= 0 && (mark[0] === "`" || isEmphasis(text, start, end, mark, inner))) {
      const made = mark[0] === "`" ? element("code", {}, inner.trim()) : emphasis(mark, inner);
      nodes.push(plain, made);
      plain = "";
      at = end + mark.length;
    } else {
      plain += mark;
      at += mark.length;
    }
    special.lastIndex = at;
  }
  return [...nodes, plain + text.slice(at)].filter((node) => node !== "");
}

const emphasis = (mark, inner) => element(mark.length > 1 ? "strong" : "em", {}, ...inline(inner));

/** What begins at a place: a backslash, all backticks that are there, or one or two marks of emphasis. */
function markAt(text, at) {
  const length = runAt(text, at);
  if (text[at] === "\\") return "\\";
  return text[at].repeat(text[at] === "`" ? length : Math.min(length, 2));
}

function runAt(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** Where the mark is that ends what another one has begun; -1: there is none. */
function closing(text, from, mark) {
  for (let at = text.indexOf(mark, from); at >= 0; ) {
    const length = runAt(text, at);
    const isBoth = length === 3 && mark[0] !== "`"; // the end of strong text in emphasized text, or the reverse
    if (length === mark.length || isBoth) return at + length - mark.length;
    at = text.indexOf(mark, at + length);
  }
  return -1;
}

/** Whether marks belong to the text between them, and not to a product or a snake_case name. */
function isEmphasis(text, start, end, mark, inner) {
  if (!inner || inner !== inner.trim()) return false;
  const isInWord = /\w/.test(text[start - 1] ?? "") || /\w/.test(text[end + mark.length] ?? "");
  return mark[0] === "*" || !isInWord;
}
