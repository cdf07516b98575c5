// The conversations of this tab, and what the browser keeps of them if its reader wants that.

const KEPT = "enginewright.conversations"; // of localStorage; there only while they are kept

const newConversation = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: [] });

/** Fires "change" when another conversation is the current one, or the list is another. */
export class Conversations extends EventTarget {
  constructor() {
    super();
    const kept = localStorage.getItem(KEPT);
    this.list = kept === null ? [] : JSON.parse(kept);
    this.isKept = kept !== null;
    for (const message of this.list.flatMap(({ messages }) => messages)) {
      if (message.end === null) message.end = "stopped"; // the page was left while it was generated
    }
    if (!this.list.length) this.list.push(newConversation());
    this.current = this.list[0];
  }

  /** Begin a new one. */
  add() {
    this.list.unshift(newConversation());
    this.select(this.list[0]);
  }

  /** Go to one; others with nothing in them are not missed. */
  select(conversation) {
    this.list = this.list.filter((one) => one === conversation || one.messages.length);
    this.current = conversation;
    this.#changed();
  }

  remove(conversation) {
    this.list = this.list.filter((one) => one !== conversation);
    if (!this.list.length) this.list.push(newConversation());
    this.select(this.list.includes(this.current) ? this.current : this.list[0]);
  }

  removeAll() {
    this.list = [newConversation()];
    this.select(this.list[0]);
  }

  keep(isKept) {
    this.isKept = isKept;
    if (!isKept) localStorage.removeItem(KEPT);
    this.save();
  }

  /** To be called when messages have changed. */
  save() {
    if (this.isKept) localStorage.setItem(KEPT, JSON.stringify(this.list));
  }

  #changed() {
    this.save();
    this.dispatchEvent(new Event("change"));
  }
}

/** What a conversation is called: how it begins. */
export function title({ messages }) {
  const text = messages[0]?.content.trim().replace(/\s+/g, " ") || "New conversation";
  return text.length > 40 ? `${text.slice(0, 39)}…` : text;
}
