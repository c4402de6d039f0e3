/** The page's frame: which view the address names, and the key. READ FIRST. */

import { html, render, useEffect, useErrorBoundary, useState } from "./lib.js";
import { get, key, setKey, whenUnauthorized } from "./api.js";
import { Compare } from "./compare.js";
import { JobPage } from "./job.js";
import { Jobs } from "./jobs.js";
import { loadMeanings } from "./meanings.js";
import { Services } from "./samplers.js";
import { Start } from "./start.js";
import { isReadOnly, setReadOnly, usePlace } from "./state.js";
import { sentence } from "./text.js";

function App() {
  const { parts, parameters } = usePlace();
  const [needsKey, setNeedsKey] = useState(false);
  const [turn, setTurn] = useState(0);
  const [chosen, setChosen] = useState(/** @type {string[]} */ ([]));
  const [version, setVersion] = useState("");
  useEffect(() => {
    whenUnauthorized(() => setNeedsKey(true));
    get("version").then((found) => {
      setReadOnly(Boolean(found.read_only));
      setVersion(found.hone);
    }).catch(() => {});
  }, []);
  const [error, reset] = useErrorBoundary();
  useEffect(() => {
    if (error) reset();
  }, [parts.join("/")]);
  const entered = () => {
    setNeedsKey(false);
    setTurn(turn + 1);
  };
  const [view = "jobs", id, tab = "charts"] = parts;
  return html`<a class="skip" href="#main" onClick=${(/** @type {Event} */ event) => { event.preventDefault(); document.getElementById("main")?.scrollIntoView(); }}>to the content</a>
    <nav class="top" aria-label="main">
      <a class="brand" href="#/jobs">hone</a>
      <a href="#/jobs" aria-current=${view === "jobs" ? "page" : undefined}>jobs</a>
      ${!isReadOnly() && html`<a href="#/new" aria-current=${view === "new" ? "page" : undefined}>start a job</a>
        <a href="#/services" aria-current=${view === "services" ? "page" : undefined}>services</a>`}
      <span class="space"></span>
      ${key() && html`<button class="tool" onClick=${() => { setKey(""); setTurn(turn + 1); }}>forget the key</button>`}
      <small>${version}</small>
    </nav>
    ${needsKey ? html`<${KeyForm} entered=${entered} />`
      : error ? html`<main id="main"><p class="fault">${sentence(error)}</p></main>`
      : view === "jobs" && id ? html`<${JobPage} key=${`${id} ${turn}`} id=${id} tab=${tab} parameters=${parameters} />`
      : view === "new" ? html`<${Start} key=${turn} like=${parameters.get("like")} />`
      : view === "services" ? html`<${Services} key=${turn} />`
      : view === "compare" ? html`<${Compare} key=${turn} ids=${(parameters.get("jobs") ?? "").split(",").filter(Boolean)} />`
      : html`<${Jobs} key=${turn} chosen=${chosen} choose=${setChosen} />`}`;
}

/** @param {{entered: () => void}} props */
function KeyForm({ entered }) {
  const [value, setValue] = useState("");
  const [error, setError] = useState("");
  /** @param {Event} event */
  const enter = async (event) => {
    event.preventDefault();
    setKey(value.trim());
    try {
      await get("v1/jobs", { limit: 1 });
      entered();
    } catch (problem) {
      setKey("");
      setError(sentence(problem));
    }
  };
  return html`<main id="main"><form class="key" onSubmit=${enter}>
    <h1>A key, please</h1>
    <p>This orchestrator has a token. Enter an API key (<code>hone keys create</code> makes one), or the token itself. It is kept in this tab only, until the tab is closed. A key that may only read sees everything and changes nothing.</p>
    <label class="wide">key <input type="password" autocomplete="off" value=${value} onInput=${(/** @type {any} */ event) => setValue(event.target.value)} /></label>
    ${error && html`<p class="fault" role="alert">${error}</p>`}
    <button class="main">enter</button>
  </form></main>`;
}

render(html`<${App} />`, /** @type {HTMLElement} */ (document.getElementById("app")));
void loadMeanings();
