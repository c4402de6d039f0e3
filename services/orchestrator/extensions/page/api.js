/**
 * Calls of Hone's API: the same routes as every client. The key is kept for this tab only, and goes
 * into the Authorization header of each request.
 */

const KEY = "hone-key";

/** An answer that is not 2xx, or none (status 0). */
export class Problem extends Error {
  /**
   * @param {number} status
   * @param {string} detail
   * @param {string} [code]
   * @param {{pointer: string, detail: string}[]} [errors]
   */
  constructor(status, detail, code = "", errors = []) {
    super(detail);
    this.status = status;
    this.code = code;
    this.errors = errors;
  }
}

/** @type {(() => void) | null} */
let onUnauthorized = null;

/** @param {() => void} callback is called when the service asks for a key */
export function whenUnauthorized(callback) {
  onUnauthorized = callback;
}

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** @param {string} value of the key; "" forgets it */
export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** @returns {Record<string, string>} */
function credentials() {
  return key() ? { authorization: `Bearer ${key()}` } : {};
}

/**
 * Returns `path?name=value&...`, without the parameters that are null, undefined or "".
 * @param {string} path
 * @param {Record<string, unknown>} [parameters]
 */
export function at(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return query ? `${path}?${query}` : path;
}

/**
 * @param {string} path below the orchestrator's address, without a first slash
 * @param {RequestInit} options
 */
async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    if (error instanceof DOMException && error.name === "TimeoutError") throw new Problem(0, "no answer in time");
    throw new Problem(0, "the orchestrator does not answer");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  if (response.status === 401) onUnauthorized?.();
  throw new Problem(response.status, told.detail ?? `status ${response.status}`, told.code, told.errors);
}

/**
 * @param {string} path
 * @param {Record<string, unknown>} [parameters]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function get(path, parameters, signal) {
  const response = await ask(at(path, parameters), { headers: credentials(), signal });
  return response.json();
}

/**
 * @param {string} path
 * @param {unknown} [body]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function post(path, body, signal) {
  const headers = {
    ...credentials(), "content-type": "application/json", "idempotency-key": crypto.randomUUID?.() ?? String(Math.random()).slice(2),
  };
  const response = await ask(path, { method: "POST", headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  return response.json();
}

/**
 * @param {string} path
 * @returns {Promise<any>}
 */
export async function remove(path) {
  const response = await ask(path, { method: "DELETE", headers: credentials() });
  return response.json();
}

/**
 * Yields the server-sent events of a path until the server ends the stream. `EventSource` cannot
 * send the key, so this reads the stream itself.
 * @param {string} path
 * @param {string} lastId
 * @param {AbortSignal} signal
 * @param {() => void} heard is called whenever anything arrives, comments too
 * @returns {AsyncGenerator<{id: string, type: string, data: any}>}
 */
export async function* stream(path, lastId, signal, heard) {
  const headers = { ...credentials(), accept: "text/event-stream", ...(lastId ? { "last-event-id": lastId } : {}) };
  const response = await ask(path, { headers, signal });
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const event = parsed(block);
      if (event) yield event;
    }
  }
}

/** @param {string} block the lines of one event; a comment gives null */
function parsed(block) {
  const event = { id: "", type: "message", data: /** @type {any} */ (null) };
  let data = "";
  for (const line of block.split("\n")) {
    const [, field, value] = /^([a-z]*): ?(.*)$/s.exec(line) ?? [];
    if (field === "id") event.id = value;
    else if (field === "event") event.type = value;
    else if (field === "data") data += value;
  }
  if (!data) return null;
  event.data = JSON.parse(data);
  return event;
}
