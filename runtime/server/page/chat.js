// A conversation as the API has it: what is sent, and how an answer grows.
//
// A message is {role: "user", content}, {role: "tool", id, content} that answers a call, or what newAnswer() makes.

import { ask } from "./api.js";
import { events } from "./stream.js";

/** The assistant's message before its first token. */
export function newAnswer(model) {
  return {
    role: "assistant",
    model,
    reasoning: "",
    content: "",
    calls: [], // {id, name, arguments}: the arguments as JSON, as far as they have come
    end: null, // why it has ended: the API's finish_reason, "stopped" by the reader, or "error"
    error: "", // in words, where that is the end
    tokens: 0,
    firstTokenS: null, // since the request
    totalS: 0,
  };
}

/** Whether there is anything in an answer that the model can be shown again. */
export const isEmpty = (message) => message.role === "assistant" && !message.content && !message.calls.length;

/** Calls of the last answer that have no result yet. */
export function openCalls(messages) {
  const last = messages.findLastIndex((message) => message.role === "assistant");
  if (last < 0 || messages[last].end === null) return [];
  const results = messages.slice(last + 1);
  if (results.some((message) => message.role !== "tool")) return [];
  return messages[last].calls.filter((call) => !results.some((result) => result.id === call.id));
}

/** Messages in the API's form. */
function shown(messages, system) {
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "tool") {
      sent.push({ role: "tool", tool_call_id: message.id, content: message.content });
    } else if (message.role === "user") {
      sent.push({ role: "user", content: message.content });
    } else if (!isEmpty(message)) {
      const tool_calls = message.calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
      sent.push({
        role: "assistant",
        content: message.content,
        ...(message.reasoning && { reasoning_content: message.reasoning }),
        ...(tool_calls.length && { tool_calls }),
      });
    }
  }
  return sent;
}

/**
 * Ask for an answer, and let it grow until it has ended; how is in the answer itself.
 *
 * @param {object[]} messages That come before the answer.
 * @param {object} answer Of newAnswer.
 * @param {{system: string, parameters: object}} settings
 * @param {AbortSignal} signal
 * @param {() => void} onGrowth Called whenever it has grown.
 * @returns {Promise<?Error>} Why it has failed, if so.
 */
export async function generate(messages, answer, settings, signal, onGrowth) {
  const begun = performance.now();
  const seconds = () => (performance.now() - begun) / 1000;
  try {
    const json = {
      ...settings.parameters,
      model: answer.model || undefined, // of a single one the server needs no name
      messages: shown(messages, settings.system),
      stream: true,
      stream_options: { include_usage: true },
    };
    const response = await ask("v1/chat/completions", { json, signal });
    for await (const event of events(response.body)) {
      if (event.usage) answer.tokens = event.usage.completion_tokens;
      for (const choice of event.choices) {
        answer.firstTokenS ??= seconds();
        grow(answer, choice.delta);
        answer.end = choice.finish_reason ?? answer.end;
      }
      onGrowth();
    }
    answer.end ??= "stop";
    return null;
  } catch (error) {
    answer.end = "stopped";
    if (error.name === "AbortError") return null;
    answer.end = "error";
    answer.error = error.message;
    return error;
  } finally {
    answer.calls = answer.calls.filter(isWhole);
    answer.totalS = seconds();
  }
}

/** Whether a call has come to its end; the API takes no part of one back. */
function isWhole(call) {
  try {
    return typeof JSON.parse(call.arguments || "{}") === "object";
  } catch {
    return false;
  }
}

function grow(answer, delta) {
  answer.reasoning += delta.reasoning_content ?? "";
  answer.content += delta.content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (answer.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name ||= called.name ?? "";
    call.arguments += called.arguments ?? "";
  }
}
