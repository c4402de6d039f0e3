/** Files that the page hands to the browser. */

/**
 * Saves a file under a name made of plain characters.
 * @param {string} name
 * @param {Blob} blob
 */
export function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^A-Za-z0-9._-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
