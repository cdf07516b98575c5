// The server's API: requests with the reader's key, and errors in words.

const KEY = "enginewright.key"; // of sessionStorage: it ends with the tab

/** What the server, or the network, has against a request. `status` is 0 where no answer has come. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

/**
 * Ask the server.
 *
 * @param {string} path Relative to the page.
 * @param {object} [options] Of fetch; `json` is a body.
 * @returns {Promise<Response>} Of a status that is no error.
 * @throws {ApiError}
 */
export async function ask(path, { json, ...options } = {}) {
  const headers = new Headers();
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  if (json !== undefined) {
    headers.set("Content-Type", "application/json");
    options = { method: "POST", body: JSON.stringify(json), ...options };
  }
  let response;
  try {
    response = await fetch(path, { headers, cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it running?", 0);
  }
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

/** What an error says; a proxy's has no JSON. */
async function reason(response) {
  const text = await response.text();
  let message;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    message = `The answer has status ${response.status}, and no reason.`;
  }
  const wait = response.headers.get("Retry-After");
  return wait ? `${message}. Try again in ${wait} s.` : message;
}

/** The models that the server has, as /v1/models says them. */
export async function listModels() {
  return (await (await ask("v1/models")).json()).data;
}
