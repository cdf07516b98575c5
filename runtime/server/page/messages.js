// How messages look, and what can be done with each.

import { openCalls } from "./chat.js";
import { button, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const ENDS = {
  length: "The answer was cut off: it has as many tokens as it may have.",
  stopped: "You have stopped the answer.",
};

/**
 * The messages of a conversation.
 *
 * @typedef {object} Actions What buttons do; each is given a message's place.
 * @property {(place: number, text: string) => void} edit Asks again with another text.
 * @property {(place: number) => void} regenerate Asks for another answer.
 * @property {(id: string, text: string) => void} answerCall Give a call its result.
 */
export class MessagesView {
  #growing = null; // the view of the answer that is generated

  /**
   * @param {Element} container
   * @param {Actions} actions
   */
  constructor(container, actions) {
    this.container = container;
    this.actions = actions;
  }

  /** Shows all messages again. While the last one is generated, `grow` extends it. */
  show(messages) {
    this.#growing = null;
    const open = openCalls(messages);
    this.container.replaceChildren(...messages.map((message, place) => this.#message(message, place, open)));
    this.#toEnd();
  }

  /** Show what was added to the last message. */
  grow() {
    const atEnd = this.container.scrollHeight - this.container.scrollTop - this.container.clientHeight < 40;
    this.#growing.update();
    if (atEnd) this.#toEnd();
  }

  #toEnd() {
    this.container.scrollTop = this.container.scrollHeight;
  }

  #message(message, place, open) {
    if (message.role === "assistant") return this.#answer(message, place, open);
    const isResult = message.role === "tool";
    const text = element("p", { className: "text" }, message.content);
    const head = heading(isResult ? "Result of a call" : "You");
    const article = element("article", { className: message.role }, head, text);
    if (!isResult) {
      const edit = button("Edit", () => article.replaceChildren(...this.#editor(message, place, article)));
      article.append(element("div", { className: "actions" }, ...copier(message.content), edit));
    }
    return article;
  }

  #editor(message, place, article) {
    const before = [...article.childNodes];
    const field = element("textarea", { value: message.content, rows: 3, "aria-label": "Your message" });
    const cancel = () => {
      article.replaceChildren(...before);
      before.at(-1).lastElementChild.focus();
    };
    const onsubmit = (event) => {
      event.preventDefault();
      if (field.value.trim()) this.actions.edit(place, field.value);
    };
    const onkeydown = (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      cancel();
    };
    const actions = element("div", { className: "actions" }, element("button", {}, "Send"), button("Cancel", cancel));
    queueMicrotask(() => field.focus()); // once it is there
    return [heading("You"), element("form", { onsubmit, onkeydown }, field, actions)];
  }

  #answer(message, place, open) {
    const view = new AnswerView(message);
    const article = view.article;
    if (message.end === null) {
      this.#growing = view;
      return article;
    }
    const forms = open.map((call) => this.#resultForm(call));
    const again = button("Regenerate", () => this.actions.regenerate(place));
    const actions = element("div", { className: "actions" }, ...copier(message.content), again);
    article.append(...forms, ...ending(message), actions);
    return article;
  }

  #resultForm(call) {
    const field = element("textarea", { rows: 2, "aria-label": `Result of ${call.name}` });
    const onsubmit = (event) => {
      event.preventDefault();
      this.actions.answerCall(call.id, field.value);
    };
    const label = element("label", {}, `Result of ${call.name}`, field);
    return element("form", { className: "result", onsubmit }, label, element("button", {}, "Give result"));
  }
}

/** An answer: its reasoning, folded; its text; its calls. */
class AnswerView {
  constructor(message) {
    this.message = message;
    this.summary = element("summary");
    this.thought = element("p", { className: "text" });
    this.reasoning = element("details", { className: "reasoning" }, this.summary, this.thought);
    const text = element("div", { className: "markdown" });
    this.text = new MarkdownView(text);
    this.calls = element("div");
    this.article = element(
      "article",
      { className: "assistant" },
      heading(message.model || "Answer"),
      this.reasoning,
      text,
      this.calls,
    );
    this.update();
  }

  update() {
    const { reasoning, content, calls, end } = this.message;
    this.reasoning.hidden = !reasoning;
    this.summary.textContent = content || calls.length || end !== null ? "Reasoning" : "Reasoning …";
    this.thought.textContent = reasoning;
    this.text.update(content);
    this.calls.replaceChildren(...calls.map(callView));
  }
}

const heading = (text) => element("h3", {}, text);

function callView(call) {
  const text = element("code", {}, indented(call.arguments));
  return element(
    "section",
    { className: "call", "aria-label": `Call of ${call.name}` },
    element("p", {}, "Calls ", element("code", {}, call.name), " with"),
    element("pre", { tabIndex: 0, role: "group", "aria-label": "Arguments" }, text),
  );
}

/** JSON for people; a call that has not ended yet is not whole. */
function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

/** What there is to say of an answer that has ended. */
function ending(message) {
  const found = [];
  const why = message.end === "error" ? message.error : ENDS[message.end];
  if (why) found.push(element("p", { className: message.end === "error" ? "error" : "note" }, why));
  if (message.tokens) {
    const rate = message.tokens / message.totalS;
    const first = `first after ${message.firstTokenS.toFixed(2)} s`;
    const text = `${message.tokens} tokens, ${first}, ${rate.toFixed(1)} tokens/s`;
    found.push(element("p", { className: "note" }, text));
  }
  return found;
}

/** A button that copies a text, where the browser lets pages do so: over HTTPS, or on this machine. */
function copier(text) {
  if (!navigator.clipboard || !text) return [];
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  return [copy];
}
