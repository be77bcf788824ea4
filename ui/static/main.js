// Loads the parts of the page. Each file is a plain module, most of which define one element; there is no build.
// A file that fails must not take the others with it, so each is imported by itself.

const PARTS = ["tabs", "header", "live", "picture", "placard", "engine_page"];

for (const name of PARTS) {
  import(`./${name}.js`).catch((error) => console.error(`The part ${name} of the page could not be loaded.`, error));
}
