/** Small parts that several views have in common. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";
import { visible } from "./text.js";

const STATES = { queued: "○", running: "▶", paused: "❚❚", succeeded: "✓", failed: "✕", cancelled: "⊘" };

/** @param {{status: string}} props */
export function Status({ status }) {
  const sign = STATES[/** @type {keyof typeof STATES} */ (status)] ?? "";
  return html`<span class=${`status ${status}`}><span aria-hidden="true">${sign}</span> ${status}</span>`;
}

const CUT = 4000;

/**
 * Text of a model or of data: never HTML, hidden characters shown, cut where it is long.
 * @param {{text: string, cut?: number, marked?: string}} props
 */
export function Text({ text, cut = CUT, marked = "" }) {
  const [end, setEnd] = useState(cut);
  const isCut = text.length > end;
  const shown = visible(isCut ? text.slice(0, end) : text);
  return html`<span class="text"><bdi>${marked ? highlighted(shown, marked) : shown}</bdi>${isCut &&
    html`<button class="more" onClick=${(/** @type {Event} */ event) => { event.stopPropagation(); setEnd(end * 4); }}>
      show more (${(text.length - end).toLocaleString("en-US")} characters are left)</button>`}</span>`;
}

/**
 * @param {string} text
 * @param {string} marked
 */
function highlighted(text, marked) {
  const found = [];
  const [lower, wanted] = [text.toLowerCase(), marked.toLowerCase()];
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0 && found.length < 400; at = lower.indexOf(wanted, from)) {
    found.push(text.slice(from, at), html`<mark>${text.slice(at, at + wanted.length)}</mark>`);
    from = at + wanted.length;
  }
  return [...found, text.slice(from)];
}

/**
 * A list of rows of one height, of which only those in view are in the document.
 * @param {{rows: any[], height: number, label: string, row: (item: any, index: number) => any, stick?: boolean}} props
 */
export function Rows({ rows, height, label, row, stick = false }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [view, setView] = useState({ top: 0, height: 600 });
  const atEnd = useRef(true);
  const look = () => {
    if (!box.current) return;
    const { scrollTop, clientHeight, scrollHeight } = box.current;
    atEnd.current = scrollHeight - scrollTop - clientHeight < 2 * height;
    setView({ top: scrollTop, height: clientHeight });
  };
  useEffect(look, []);
  useLayoutEffect(() => {
    if (stick && atEnd.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [rows.length]);
  const first = Math.max(0, Math.floor(view.top / height) - 10);
  const last = Math.min(rows.length, Math.ceil((view.top + view.height) / height) + 10);
  return html`<div class="rows" ref=${box} onScroll=${look} tabindex="0" role="group" aria-label=${label}>
    <div style=${{ height: `${rows.length * height}px` }}>
      <div style=${{ transform: `translateY(${first * height}px)` }}>
        ${rows.slice(first, last).map((item, index) => row(item, first + index))}
      </div>
    </div>
  </div>`;
}

/**
 * A dialog that is open while it is shown. Escape closes it.
 * @param {{title: string, onClose: () => void, children?: any}} props
 */
export function Dialog({ title, onClose, children }) {
  const box = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    box.current?.showModal();
  }, []);
  return html`<dialog ref=${box} aria-label=${title} onClose=${onClose} onCancel=${onClose}>
    <header><h2>${title}</h2><button class="tool" aria-label="close" onClick=${onClose}>×</button></header>
    ${children}
  </dialog>`;
}

/** @param {{error: unknown}} props */
export function Fault({ error }) {
  if (!error) return null;
  return html`<p class="fault" role="alert">${error instanceof Error ? error.message : String(error)}</p>`;
}

/** The steps of a job that its program ends. */
export const ENDLESS = 1e9;

/**
 * @param {{value: number | null | undefined, of: number | null | undefined}} props
 */
export function Progress({ value, of }) {
  if (of === ENDLESS) return html`<span class="progress">${value ?? 0}</span>`;
  const share = of ? Math.min(1, (value ?? 0) / of) : 0;
  return html`<span class="progress"><span class="bar" aria-hidden="true"><span style=${{ width: `${share * 100}%` }}></span></span>
    ${value ?? 0}<span class="of">/${of ?? "?"}</span></span>`;
}
