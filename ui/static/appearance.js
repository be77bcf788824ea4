// Light or dark before the first paint: the visitor's choice, else the system's. Gradio follows the class on <body>.
(() => {
  const KEY = "beholder.appearance";
  let kept = "auto";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const read = () => {
    try {
      return localStorage.getItem(KEY) ?? "auto";
    } catch {
      return kept; // storage may be forbidden: it holds until the page is left
    }
  };
  const apply = () => {
    const choice = read();
    const dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.body?.classList.toggle("dark", dark);
  };
  window.beholderAppearance = {
    get: read,
    set(choice) {
      kept = choice;
      try {
        if (choice === "auto") localStorage.removeItem(KEY);
        else localStorage.setItem(KEY, choice);
      } catch {
        // as above
      }
      apply();
    },
  };
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", apply);
  apply();
})();
