// The page: what its parts do for each other.

import { ApiError, listModels, setKey } from "./api.js";
import { generate, newAnswer, openCalls } from "./chat.js";
import { Conversations, title } from "./conversations.js";
import { button, byId, element } from "./dom.js";
import { Load } from "./load.js";
import { MessagesView } from "./messages.js";
import { SettingError, readSettings } from "./settings.js";

const [model, input, messages] = [byId("model"), byId("input"), byId("messages")];
const conversations = new Conversations();
const view = new MessagesView(messages, { edit, regenerate, answerCall });
const load = new Load(byId("load").firstElementChild, {
  charts: byId("charts"),
  figures: byId("figures"),
  error: byId("load-error"),
});
let running = null; // {conversation, controller} of the answer that is generated

// The models.

async function findModels() {
  let found;
  try {
    found = await listModels();
  } catch (error) {
    showError(error);
    return;
  }
  byId("key-form").hidden = true;
  showError(null);
  model.replaceChildren(...found.map(({ id, root }) => element("option", { value: id, "data-root": root }, id)));
  watchModel();
}

/** An engine of several names has its metrics under the first. */
function watchModel() {
  load.watch(model.selectedOptions[0].dataset.root);
}

function useKey(event) {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  findModels();
}

function showError(error) {
  byId("error").textContent = error?.message ?? "";
  if (error instanceof ApiError && error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  } else if (error instanceof SettingError) {
    error.field.closest("details").open = true;
    error.field.focus();
  }
}

// Answers.

/** Let the model answer these messages, which are the current conversation's from now on, if nothing is against it. */
function answer(asked) {
  const settings = running ? null : readableSettings();
  if (settings) run(asked, settings);
  return settings !== null;
}

async function run(asked, settings) {
  const conversation = conversations.current;
  if (!model.value) findModels(); // the server could not be reached before
  const made = newAnswer(model.value);
  conversation.messages = [...asked, made];
  running = { conversation, controller: new AbortController() };
  byId("spoken").textContent = "Answering";
  showError(null);
  showAll();
  const grow = perFrame(() => running && conversation === conversations.current && view.grow());
  const error = await generate(asked, made, settings, running.controller.signal, grow);
  running = null;
  byId("spoken").textContent = spoken(made);
  showAll();
  if (error instanceof ApiError && error.status === 401) showError(error);
}

/** The settings; null if one is wrong, which the page then shows. */
function readableSettings() {
  try {
    return readSettings(byId("settings"));
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    showError(error);
    return null;
  }
}

function send(event) {
  event.preventDefault();
  const content = input.value;
  if (content.trim() && answer([...conversations.current.messages, { role: "user", content }])) input.value = "";
}

function edit(place, content) {
  answer([...conversations.current.messages.slice(0, place), { role: "user", content }]);
}

function regenerate(place) {
  answer(conversations.current.messages.slice(0, place));
}

/** The model goes on when all of its calls have results. */
function answerCall(id, content) {
  const given = [...conversations.current.messages, { role: "tool", id, content }];
  if (!openCalls(given).length) {
    answer(given);
    return;
  }
  conversations.current.messages = given;
  showAll();
}

function stop() {
  running?.controller.abort();
}

/** What a screen reader says of an answer: all of it at its end, since one that grows would be said in pieces. */
function spoken({ content, calls, end, error }) {
  const called = calls.map(({ name }) => `The model calls ${name}.`);
  const why = { error, stopped: "Stopped.", length: "Cut off." }[end] ?? "";
  return ["Answer:", content, ...called, why].filter((part) => part).join(" ");
}

// What is shown.

function showAll() {
  const isBusy = running !== null;
  const { current } = conversations;
  const hasFocus = messages.contains(document.activeElement) || document.activeElement === byId("stop");
  view.show(current.messages);
  showConversations();
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  byId("busy").hidden = !isBusy;
  messages.ariaBusy = String(isBusy);
  if (hasFocus) (messages.querySelector("form textarea") ?? input).focus(); // what had it is no more
  conversations.save();
}

function showConversations() {
  const items = conversations.list.map((conversation) => {
    const name = title(conversation);
    const isCurrent = conversation === conversations.current;
    const select = button(name, () => conversations.select(conversation), { "aria-current": isCurrent });
    const remove = button("×", () => conversations.remove(conversation), { "aria-label": `Delete: ${name}` });
    return element("li", {}, select, remove);
  });
  byId("conversations").replaceChildren(...items);
}

/** A function that calls another one at most once a frame. */
function perFrame(call) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      call();
    });
  };
}

// What the reader does.

conversations.addEventListener("change", () => {
  if (running && running.conversation !== conversations.current) stop();
  showAll();
});
model.addEventListener("change", watchModel);
byId("key-form").addEventListener("submit", useKey);
byId("composer").addEventListener("submit", send);
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", () => {
  conversations.add();
  input.focus();
});
byId("delete-all").addEventListener("click", () => conversations.removeAll());
byId("keep").addEventListener("change", (event) => conversations.keep(event.target.checked));
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});

if (matchMedia("(max-width: 60rem)").matches) {
  for (const panel of document.querySelectorAll("aside > details")) panel.open = false;
}
byId("keep").checked = conversations.isKept;
showAll();
findModels();
