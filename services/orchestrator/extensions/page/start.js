/** A form that starts a job from its TOML, checked as `hone submit --dry-run` checks it. */

import { html, useEffect, useRef, useState } from "./lib.js";
import { parse, stringify } from "./vendor/toml/index.js";
import { get, post, Problem } from "./api.js";
import { link } from "./state.js";
import { duration, number, plain, sentence, visible } from "./text.js";
import { Text } from "./parts.js";

const BEGINNING = `# Files are named as the orchestrator sees them: absolute, or from its folder.
name = "first"
model = ""                           # a folder, or a Hugging Face id
steps = 100

[data]
train = ""                           # .jsonl, .json, .csv, .parquet, or a dataset of the Hub
eval = ""                            # held-out problems

[sampling]
prompts_per_step = 32
group_size = 8
max_tokens = 512

[[rewards]]
grader = "exact_match"
params = { column = "answer" }

[training]
learning_rate = 1e-6

[evaluation]
every = 10
`;

/** @typedef {{detail: string, line: number | null}} Told */

/** @param {{like: string | null}} props */
export function Start({ like }) {
  const [text, setText] = useState(like ? "" : BEGINNING);
  const [faults, setFaults] = useState(/** @type {Told[]} */ ([]));
  const [tried, setTried] = useState(/** @type {any} */ (null));
  const [isBusy, setBusy] = useState("");
  const area = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => {
    if (!like) return;
    get(`v1/jobs/${like}`).then((record) => setText(stringify(present(record.job)))).catch((error) => setFaults([{ detail: sentence(error), line: null }]));
  }, [like]);
  /** @param {(job: any) => Promise<void>} work */
  const checked = async (work, what = "") => {
    setFaults([]);
    setTried(null);
    setBusy(what);
    try {
      await work(parse(text));
    } catch (error) {
      setFaults(told(error, text));
    }
    setBusy("");
  };
  const check = () => checked(async (job) => setTried(await post("v1/jobs/dry_run", { job })), "checking");
  const submit = () => checked(async (job) => {
    const record = await post("v1/jobs", { job });
    location.hash = link(["jobs", record.id]);
  }, "submitting");
  /** @param {number} line */
  const show = (line) => {
    const before = text.split("\n").slice(0, line - 1).join("\n").length;
    area.current?.focus();
    area.current?.setSelectionRange(before ? before + 1 : 0, before + 1 + (text.split("\n")[line - 1]?.length ?? 0));
  };
  return html`<main id="main" class="start">
    <h1>Start a job</h1>
    <div class="split-even">
      <div>
        <label class="wide">the job, as TOML
          <textarea ref=${area} rows="32" spellcheck="false" value=${text} onInput=${(/** @type {any} */ event) => setText(event.target.value)}
            onKeyDown=${(/** @type {KeyboardEvent} */ event) => (event.ctrlKey || event.metaKey) && event.key === "Enter" && check()}></textarea></label>
        <button onClick=${check} disabled=${Boolean(isBusy)} title="checks data, rewards and model as a submission does, and submits nothing">check it</button>
        <button class="main" onClick=${submit} disabled=${Boolean(isBusy)} title="submits the job: it is queued, and begins when a trainer is free">start it</button>
        <span class="hint" aria-live="polite">${isBusy}</span>
      </div>
      <div aria-live="polite">
        ${faults.length > 0 && html`<ul class="faults" role="alert">${faults.map(({ detail, line }) => html`<li>${line !== null &&
          html`<button onClick=${() => show(line)}>line ${line}</button>`} ${visible(detail)}</li>`)}</ul>`}
        ${tried && html`<${Tried} tried=${tried} />`}
        ${!faults.length && !tried && html`<p class="hint">“check it” reads the data, tries the rewards and shows the first prompts as the model reads them. Ctrl-Enter does so too.</p>`}
      </div>
    </div>
  </main>`;
}

/**
 * Returns the value without what is null or empty: TOML has no null.
 * @param {any} value
 * @returns {any}
 */
function present(value) {
  if (Array.isArray(value)) return value.map(present);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).filter(([, one]) => one !== null && !(typeof one === "object" && !Object.keys(one).length)).map(([name, one]) => [name, present(one)]));
}

/**
 * Returns the faults of the text, each with its line where that is known.
 * @param {any} error
 * @param {string} text
 * @returns {Told[]}
 */
function told(error, text) {
  if (error instanceof Problem && error.errors.length) {
    return error.errors.map((fault) => ({ detail: fault.detail, line: lineOf(text, fault.pointer.split("/").filter(Boolean)) }));
  }
  if (typeof error?.line === "number") return [{ detail: sentence(error).split("\n")[0], line: error.line }];
  return [{ detail: sentence(error), line: null }];
}

/**
 * Returns the line of a key: of its own name below its section, else of the section.
 * @param {string} text
 * @param {string[]} path such as `["job", "sampling", "group_size"]`
 */
export function lineOf(text, path) {
  const keys = path[0] === "job" ? path.slice(1) : path;
  const names = keys.filter((key) => !/^\d+$/.test(key));
  let count = Number(keys.find((key) => /^\d+$/.test(key)) ?? 0);
  let section = "";
  let found = null;
  for (const [index, line] of text.split("\n").entries()) {
    const head = /^\s*\[\[?\s*([\w.-]+)\s*\]\]?/.exec(line);
    if (head) {
      section = head[1];
      if (names.join(".").startsWith(section) && count-- === 0 && found === null) found = index + 1;
      continue;
    }
    const own = /^\s*([\w.-]+)\s*=/.exec(line);
    const whole = own ? [section, own[1]].filter(Boolean).join(".") : "";
    if (whole && (whole === names.join(".") || names.join(".").startsWith(`${whole}.`)) && count <= 0) return index + 1;
  }
  return found;
}

/** @param {{tried: any}} props */
function Tried({ tried }) {
  const { plan } = tried;
  const time = plan?.placement.time;
  const facts = [
    ["problems", tried.num_train === null ? "a stream" : number(tried.num_train)], ["held out", number(tried.num_held_out)],
    ["columns", tried.columns.join(", ")], ["steps", number(tried.job.steps)],
  ];
  return html`<section class="tried">
    <p class="well"><span aria-hidden="true">✓</span> the job is fine</p>
    ${[...tried.warnings, ...tried.trial].map((/** @type {string} */ one) => html`<p class="hint">${visible(one)}</p>`)}
    <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${visible(String(value))}</dd></div>`)}</dl>
    ${plan ? html`<details><summary>what it will probably need${time && plan.steps ? `: ${duration(plan.steps * time.step_s)}` : ""}</summary><pre><${Text} text=${JSON.stringify(plan, null, 2)} /></pre></details>`
      : tried.not_planned && html`<p class="hint">not planned: ${visible(tried.not_planned)}</p>`}
    <h2>The first prompts</h2>
    ${tried.prompts.map((/** @type {any} */ prompt) => html`<div class="prompt-box"><small>problem ${prompt.index}${prompt.num_tokens === null ? "" : `, ${prompt.num_tokens} tokens`}</small><br />
      <${Text} text=${prompt.text ?? (typeof prompt.content === "string" ? prompt.content : prompt.content.map((/** @type {any} */ one) => `${one.role}: ${plain(one.content)}`).join("\n"))} cut=${1500} /></div>`)}
  </section>`;
}
