// The page that a phone opens from the QR code: the label out of its own address.

import { copy } from "./clipboard.js";
import { decodeLabel, drawLabel, year } from "./label.js";

const NONE = { title: "No label", text: "This address holds no label, or not all of one. Scan the code again." };
const article = document.querySelector(".label");
const share = document.getElementById("share");
let label = null;

async function show() {
  label = await decodeLabel(location.hash.slice(1));
  drawLabel(article, label ?? NONE);
  document.title = (label ?? NONE).title;
  share.hidden = !label || !navigator.share;
}

const text = () => {
  const { artist, title, year: made, medium, text } = label ?? NONE;
  return [artist, title, made == null ? null : year(made), medium, "", text].filter((line) => line != null).join("\n").trim();
};

share.addEventListener("click", () => navigator.share({ title: label.title, url: location.href }).catch(() => {}));
document.getElementById("print").addEventListener("click", () => print());
document.getElementById("copy").addEventListener("click", async ({ target }) => {
  target.textContent = (await copy(text())) ? "Copied" : "Not copied";
});
addEventListener("hashchange", show);
show();
