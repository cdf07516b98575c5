// Server-sent events, as chats have them: each is one line of JSON, and the last one says [DONE].

import { ApiError } from "./api.js";

/**
 * The events of a stream, as objects.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @throws {ApiError} An event is an error, or the stream ends before [DONE].
 */
export async function* events(body) {
  for await (const line of lines(body)) {
    if (!line.startsWith("data:")) continue; // a comment, or the empty line after an event
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 200);
    yield event;
  }
  throw new ApiError("The connection has ended before the answer did.", 0);
}

/** The lines of a text in UTF-8, wherever it was cut on its way. */
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const found = (rest + value).split("\n");
      rest = found.pop();
      yield* found;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection has ended before the answer did.", 0);
  } finally {
    await reader.cancel().catch(() => {}); // it has ended already where reading has failed
  }
}
