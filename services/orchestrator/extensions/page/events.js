/** The events of a job, as a log. */

import { html, useMemo, useState } from "./lib.js";
import { Rows } from "./parts.js";
import { clock, visible } from "./text.js";

const TYPES = ["status", "log", "step", "eval", "checkpoint"];
const LEVELS = ["info", "warning", "error"];

/** @param {{run: import("./live.js").Run}} props */
export function Events({ run }) {
  const [type, setType] = useState("");
  const [level, setLevel] = useState("");
  const [query, setQuery] = useState("");
  const shown = useMemo(() => run.events.filter((event) =>
    (!type || event.type === type) && (!level || LEVELS.indexOf(event.level) >= LEVELS.indexOf(level)) &&
    (!query || event.message.toLowerCase().includes(query.toLowerCase()))), [run.events, type, level, query]);
  return html`<div>
    <div class="bar-of-tools small">
      <input type="search" placeholder="search the messages" aria-label="search the messages" value=${query} onInput=${(/** @type {any} */ event) => setQuery(event.target.value)} />
      <select aria-label="type" value=${type} onChange=${(/** @type {any} */ event) => setType(event.target.value)}>
        <option value="">all types</option>${TYPES.map((name) => html`<option value=${name}>${name}</option>`)}</select>
      <select aria-label="level" value=${level} onChange=${(/** @type {any} */ event) => setLevel(event.target.value)}>
        <option value="">all levels</option><option value="warning">warnings and errors</option><option value="error">errors</option></select>
      <span class="hint">${shown.length} of the newest ${run.events.length} events</span>
    </div>
    <${Rows} rows=${shown} height=${26} label="events" stick=${true} row=${(/** @type {any} */ event) => html`<div key=${event.id} class=${`event ${event.level}`}>
      <time dateTime=${new Date(event.time * 1000).toISOString()}>${clock(event.time)}</time>
      <span class="type">${event.type}</span>
      <span class="message" title=${visible(event.message)}>${event.level === "info" ? "" : `${event.level}: `}${visible(event.message)}</span>
    </div>`} />
  </div>`;
}
