// The signs of the buttons, drawn for a grid of 20 × 20.

const PATHS = {
  camera: '<rect x="2.5" y="5.5" width="10.5" height="9" rx="2"/><path d="M13 9l4.5-2.5v7L13 11z"/>',
  screen: '<rect x="2.5" y="3.5" width="15" height="10.5" rx="1.5"/><path d="M7 17h6M10 14v3"/>',
  file: '<path d="M5.5 2.5h6l3.5 3.5v11.5h-9.5z"/><path d="M11.5 2.5v3.5H15"/>',
  stop: '<rect x="5" y="5" width="10" height="10" rx="1.5" fill="currentColor"/>',
  snap: '<circle cx="10" cy="10" r="7"/><circle cx="10" cy="10" r="3.8" fill="currentColor" stroke="none"/>',
  flip: '<path d="M4 8a6.5 6.5 0 0 1 11.5-2.5M16 12a6.5 6.5 0 0 1-11.5 2.5M15.8 2.5v3.2h-3.2M4.2 17.5v-3.2h3.2"/>',
  mirror: '<path d="M10 2.5v15M7.5 5.5L2.5 14.5h5zM12.5 5.5l5 9h-5z"/>',
  full: '<path d="M3 7V3h4M13 3h4v4M17 13v4h-4M7 17H3v-4"/>',
  speak: '<path d="M3 8v4h3l4 3.5v-11L6 8zM13 7a4.2 4.2 0 0 1 0 6M15.3 4.7a7.5 7.5 0 0 1 0 10.6"/>',
  copy: '<rect x="7" y="7" width="9.5" height="9.5" rx="1.5"/><path d="M13 7V5a1.5 1.5 0 0 0-1.5-1.5H5A1.5 1.5 0 0 0 3.5 5v6.5A1.5 1.5 0 0 0 5 13h2"/>',
  star: '<path d="M10 2.8l2.2 4.6 5 .7-3.6 3.5.9 5L10 14.2l-4.5 2.4.9-5L2.8 8.1l5-.7z"/>',
  up: '<path d="M3 9h3v8H3zM6 9l3.5-6.5c1.5 0 2.2 1 1.9 2.5L10.8 8H16c1 0 1.7.9 1.5 1.9l-1.3 6c-.2.7-.8 1.1-1.5 1.1H6"/>',
  down: '<path d="M3 11h3V3H3zM6 11l3.5 6.5c1.5 0 2.2-1 1.9-2.5l-.6-3H16c1 0 1.7-.9 1.5-1.9l-1.3-6C16 3.4 15.4 3 14.7 3H6"/>',
  keys: '<rect x="1.8" y="5" width="16.4" height="10" rx="2"/><path d="M5 8.3h.1M8.3 8.3h.1M11.6 8.3h.1M14.9 8.3h.1M6.5 11.8h7"/>',
  save: '<path d="M10 3v9.5M6 9l4 4 4-4M3.5 16.5h13"/>',
};

/** An icon as markup; it says nothing, so its button needs a name. */
export const icon = (name) =>
  `<svg viewBox="0 0 20 20" fill="none" stroke="currentColor" stroke-width="1.5" stroke-linecap="round"
    stroke-linejoin="round" aria-hidden="true">${PATHS[name]}</svg>`;
