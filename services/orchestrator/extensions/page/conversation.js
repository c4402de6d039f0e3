/** A conversation, message by message. What was not sampled, and so is not trained on, is dimmed. */

import { html } from "./lib.js";
import { Text } from "./parts.js";
import { plain, visible } from "./text.js";

/** @param {{messages: any[], search?: string}} props */
export function Conversation({ messages, search = "" }) {
  return html`<ol class="conversation">${messages.map((message, index) => html`<li key=${index} class=${message.role === "assistant" ? "sampled" : "masked"}>
    <span class="role">${visible(String(message.role))}${message.name ? ` ${visible(String(message.name))}` : ""}</span>
    ${message.reasoning_content && html`<details><summary>reasoning</summary><${Text} text=${plain(message.reasoning_content)} marked=${search} /></details>`}
    <${Text} text=${plain(message.content)} marked=${search} />
    ${(Array.isArray(message.tool_calls) ? message.tool_calls : []).map((/** @type {any} */ call) => html`<code class="call">${visible(called(call))}</code>`)}
  </li>`)}</ol>`;
}

/** @param {any} call */
function called(call) {
  const { name, arguments: given } = call?.function ?? call ?? {};
  return `${name}(${typeof given === "string" ? given : JSON.stringify(given ?? {})})`;
}
