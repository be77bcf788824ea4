// Loads the parts of the page. Each file is a plain module, most of which define one element; there is no build.
// A file that fails must not take the others with it, so each is imported by itself.

const PARTS = ["header", "live", "picture", "placard", "engine_page"];

// A file that is dropped beside a place for files must not take the place of the page.
const carriesFiles = (event) => !event.defaultPrevented && event.dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = "none";
});
addEventListener("drop", (event) => carriesFiles(event) && event.preventDefault());

for (const name of PARTS) {
  import(`./${name}.js`).catch((error) => console.error(`The part ${name} of the page could not be loaded.`, error));
}
