// Registers the elements of the page. Each file is a plain module that defines one element; there is no build.
// A file that fails must not take the others with it, so each is imported by itself.

const ELEMENTS = ["header", "live", "picture", "placard", "engine_page"];

for (const name of ELEMENTS) {
  import(`./${name}.js`).catch((error) => console.error(`The part ${name} of the page could not be loaded.`, error));
}
