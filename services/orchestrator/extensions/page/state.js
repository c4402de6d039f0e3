/** State that several parts of the page share: the address, and what the viewer has chosen. */

import { useEffect, useState } from "./lib.js";

let readOnly = false;

/** Returns whether the page shows run folders alone, where nothing can be changed. */
export function isReadOnly() {
  return readOnly;
}

/** @param {boolean} value */
export function setReadOnly(value) {
  readOnly = value;
}

/**
 * The address after `#`: its parts, and its parameters.
 * @typedef {{parts: string[], parameters: URLSearchParams}} Place
 */

/** @returns {Place} */
export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), parameters: new URLSearchParams(query) };
}

/**
 * Returns an address of the page.
 * @param {string[]} parts
 * @param {Record<string, string | number | null | undefined>} [parameters]
 */
export function link(parts, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

export function usePlace() {
  const [found, setFound] = useState(place);
  useEffect(() => {
    const changed = () => setFound(place());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return found;
}

/**
 * A choice that this browser remembers.
 * @template T
 * @param {string} name
 * @param {T} initial
 * @returns {[T, (value: T) => void]}
 */
export function useChoice(name, initial) {
  const [value, setValue] = useState(() => {
    try {
      const kept = localStorage.getItem(`hone-${name}`);
      return kept === null ? initial : /** @type {T} */ (JSON.parse(kept));
    } catch {
      return initial;
    }
  });
  /** @param {T} next */
  const choose = (next) => {
    setValue(next);
    try {
      localStorage.setItem(`hone-${name}`, JSON.stringify(next));
    } catch {
      // private windows may keep nothing
    }
  };
  return [value, choose];
}

/**
 * Calls `work` now and then every `every_ms`, but not while the tab is hidden.
 * @param {() => void} work
 * @param {number} every_ms
 * @param {unknown[]} inputs
 */
export function useRepeated(work, every_ms, inputs) {
  useEffect(() => {
    work();
    const timer = setInterval(() => document.hidden || work(), every_ms);
    const shown = () => document.hidden || work();
    document.addEventListener("visibilitychange", shown);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, inputs);
}
