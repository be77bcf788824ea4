// A wall label: how it looks, and how it travels in the fragment of an address, so that no server keeps it.
//
// A label: {title, artist, year, medium, text}; what is not known is null or "".

const READABLE = 900; // bytes of an address; denser codes are hard to read from a screen
const FIELDS = ["title", "artist", "year", "medium", "text"];

/** Draws a label into an element; fields that are not known take no room. */
export function drawLabel(element, label) {
  const shown = { ...label, year: label.year == null ? "" : year(label.year) };
  for (const name of FIELDS) {
    let part = element.querySelector(`.label-${name}`);
    if (!part) {
      part = document.createElement(name === "title" ? "h2" : "p");
      part.className = `label-${name}`;
      part.dir = "auto";
      element.append(part);
    }
    part.textContent = shown[name] ?? "";
    part.hidden = !shown[name];
  }
}

/** A year as labels write it. */
export const year = (number) => (number < 0 ? `${-number} BC` : String(number));

/** A label as text of an address's fragment: `z` and deflated JSON, or `j` and plain JSON, in base64url. */
export async function encodeLabel(label) {
  const bytes = new TextEncoder().encode(JSON.stringify(FIELDS.map((name) => label[name] ?? null)));
  if (typeof CompressionStream === "undefined") return `j${base64url(bytes)}`;
  return `z${base64url(await through(bytes, new CompressionStream("deflate-raw")))}`;
}

/** The label in a fragment, or null where there is none. */
export async function decodeLabel(fragment) {
  try {
    const bytes = fromBase64url(fragment.slice(1));
    const plain = fragment[0] === "z" ? await through(bytes, new DecompressionStream("deflate-raw")) : bytes;
    const values = JSON.parse(new TextDecoder().decode(plain));
    return Object.fromEntries(FIELDS.map((name, index) => [name, values[index]]));
  } catch {
    return null; // cut or mistyped
  }
}

/** The address of the page that shows a label. */
export async function labelAddress(label, home = "") {
  const page = home ? new URL("ui/own/label.html", home) : new URL("label.html", import.meta.url);
  page.hash = await encodeLabel(label);
  return page.href;
}

/**
 * The address for a code that phones can read: as long as it may be, with as much of the text as goes into it.
 * @returns {code, whole} addresses, the same unless the label is very long
 */
export async function codeAddress(label, home = "") {
  const whole = await labelAddress(label, home);
  let code = whole;
  for (let signs = [...label.text]; code.length > READABLE && signs.length; ) {
    signs = signs.slice(0, Math.floor(signs.length * 0.9));
    code = await labelAddress({ ...label, text: `${signs.join("").trimEnd()} …` }, home);
  }
  return { code, whole };
}

async function through(bytes, stream) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}

function base64url(bytes) {
  const text = btoa(String.fromCharCode(...bytes));
  return text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function fromBase64url(text) {
  const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  return Uint8Array.from(binary, (character) => character.charCodeAt(0));
}
