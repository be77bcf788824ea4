// Loads the parts of the page. Each file is a plain module, most of which define one element; there is no build.
// A file that fails must not take the others with it, so each is imported by itself.

const PARTS = ["header", "live", "picture", "placard", "engine_page"];
const RELOADS = "beholder.reloads"; // how often the page was loaded anew since all its parts were there
const MOST_RELOADS = 3; // then it is not the server that keeps them away
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 4000;

// A file that is dropped beside a place for files must not take the place of the page.
const carriesFiles = (event) => !event.defaultPrevented && event.dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = "none";
});
addEventListener("drop", (event) => carriesFiles(event) && event.preventDefault());

// Gives whether another try may help: browsers tell with a TypeError that a file could not be fetched.
const load = (name) =>
  import(`./${name}.js`).then(
    () => false,
    (error) => {
      console.error(`The part ${name} of the page could not be loaded.`, error);
      return error instanceof TypeError;
    },
  );

// Browsers remember that a module could not be fetched for as long as the page lives. So the page is loaded anew, once
// the server that went away while it was being loaded answers again.
async function reload() {
  const count = Number(sessionStorage.getItem(RELOADS));
  if (count >= MOST_RELOADS) return;
  for (let pauseMs = FIRST_PAUSE_MS; ; pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS)) {
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    const answer = await fetch(import.meta.url, { cache: "no-store" }).catch(() => null);
    if (answer?.ok) break;
  }
  sessionStorage.setItem(RELOADS, count + 1);
  location.reload();
}

Promise.all(PARTS.map(load))
  .then((missing) => (missing.includes(true) ? reload() : sessionStorage.removeItem(RELOADS)))
  .catch(() => {}); // storage may be forbidden: nobody could count, and it might go on for ever
