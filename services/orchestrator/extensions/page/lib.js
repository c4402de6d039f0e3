/** The libraries, under one name. Everything else imports them from here. */

import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render } from "./vendor/preact.js";
export {
  useCallback, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState,
} from "./vendor/hooks.js";
export { default as uPlot } from "./vendor/uplot.js";

/** Makes elements from a template. Values are text or properties, never HTML. */
export const html = htm.bind(h);
