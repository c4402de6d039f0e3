/**
 * Text as the page shows it: numbers, times, durations, and text of models and data, whose control
 * characters are made visible.
 */

/** Characters that have no picture, or change the order of others: shown by their code point. */
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

/**
 * Returns the text with every hidden character as `⟨U+202E⟩`.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(HIDDEN, (char) => `⟨U+${hex(char)}⟩`);
}

/** @param {string} char */
function hex(char) {
  return (char.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0");
}

/**
 * Returns the content of a chat message, or a text, as one text.
 * @param {unknown} content
 * @returns {string}
 */
export function plain(content) {
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (Array.isArray(content)) {
    return content.map((part) => (typeof part?.text === "string" ? part.text : plain(part))).join("\n");
  }
  return JSON.stringify(content, null, 1);
}

/**
 * Returns a number with a few significant digits; "–" for a missing one.
 * @param {number | null | undefined} value
 * @param {number} [digits]
 */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(digits - 1);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(digits)));
}

/**
 * Returns for example `42 s`, `3 min 05 s` or `2 h 10 min`.
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/**
 * Returns a short time such as `12 ms`.
 * @param {number} seconds
 */
export function brief(seconds) {
  return seconds < 0.1 ? `${Math.round(seconds * 1000)} ms` : `${number(seconds, 2)} s`;
}

/**
 * Returns how long ago a time was.
 * @param {number} time_s Unix seconds
 * @param {number} [now_s]
 */
export function ago(time_s, now_s = Date.now() / 1000) {
  const seconds = Math.max(0, now_s - time_s);
  if (seconds < 60) return "just now";
  const [size, unit] = seconds < 3600 ? [60, "min"] : seconds < 86400 ? [3600, "h"] : [86400, "d"];
  return `${Math.floor(seconds / size)} ${unit} ago`;
}

/**
 * Returns a time in the viewer's zone.
 * @param {number | null | undefined} time_s Unix seconds
 */
export function clock(time_s) {
  if (!time_s) return "–";
  return new Date(time_s * 1000).toLocaleString(undefined, {
    month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit",
  });
}

/**
 * Returns a size such as `12.3 MB`.
 * @param {number} size_bytes
 */
export function bytes(size_bytes) {
  for (const [unit, size] of /** @type {[string, number][]} */ ([["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])) {
    if (size_bytes >= size) return `${(size_bytes / size).toPrecision(3)} ${unit}`;
  }
  return `${size_bytes} B`;
}

/**
 * Returns the sentence of an error.
 * @param {unknown} error
 */
export function sentence(error) {
  return error instanceof Error ? error.message : String(error);
}
