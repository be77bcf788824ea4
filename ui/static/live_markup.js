// What <beholder-live> is made of.

import { icon } from "./icons.js";

const round = (action, name, sign, more = "") =>
  `<button type="button" class="button round" data-do="${action}" aria-label="${name}" title="${name}" ${more}>${icon(sign)}</button>`;

/** @param secure  whether the browser gives this page cameras  @param screens whether it gives screens */
export const markup = ({ secure, screens }) => `
  <div class="live-main">
    <section class="live-stage" aria-label="What is looked at">
      <div class="live-picture">
        <video muted playsinline></video>
        <img alt="The picture that is looked at">
      </div>
      <p class="live-mark"><span class="live-dot"></span><span class="live-mark-words"></span></p>
      <p class="live-stale" hidden></p>
      <p class="live-words live-over" aria-hidden="true" dir="auto"></p>
      <div class="live-begin">
        <h2>Point a camera.<br>Read what it sees.</h2>
        <div class="live-choices">
          ${secure ? `<button type="button" class="button primary" data-do="camera">${icon("camera")}Start the camera</button>` : ""}
          ${screens ? `<button type="button" class="button" data-do="screen">${icon("screen")}Share a screen</button>` : ""}
          <button type="button" class="button ${secure ? "" : "primary"}" data-do="file">${icon("file")}Open a file</button>
        </div>
        <p class="live-promise">Pictures go to this server only. Nothing is kept.</p>
      </div>
      <div class="live-bar" role="toolbar" aria-label="While it looks">
        <button type="button" class="button live-stop" data-do="stop">${icon("stop")}Stop</button>
        ${round("snap", "Look now (space)", "snap")}
        ${round("flip", "Other camera", "flip", "hidden")}
        ${round("mirror", "Mirror (M)", "mirror")}
        ${round("aloud", "Read aloud (R)", "speak", 'aria-pressed="false"')}
        ${round("wall", "Full screen (F)", "full", 'aria-pressed="false"')}
      </div>
    </section>
    <dl class="live-figures" aria-label="Numbers"></dl>
  </div>
  <div class="live-side">
    ${secure ? "" : insecure()}
    <div class="live-reading">
      <p class="notice bad live-warning" role="alert" hidden></p>
      <p class="live-words live-beside" dir="auto"></p>
      <p class="live-link" role="status"></p>
      <button type="button" class="button quiet round live-copy" data-do="copy" aria-label="Copy the words (C)" title="Copy the words (C)">${icon("copy")}</button>
    </div>
    <form class="live-prompt"></form>
    <details class="live-more">
      <summary>Camera and page</summary>
      <div class="live-options">
        <label class="field"><span>Camera</span><select name="camera"><option value="">The browser's choice</option></select></label>
        <label class="field"><span>Size of the pictures</span><select name="side">
          <option value="320">320 pixels</option>
          <option value="640" selected>640 pixels</option>
          <option value="1024">1024 pixels</option>
          <option value="1600">1600 pixels</option>
        </select></label>
        <label class="switch"><input type="checkbox" name="mirror">Mirror my view only</label>
        <label class="switch"><input type="checkbox" name="aloud">Read aloud</label>
        <label class="switch"><input type="checkbox" name="over">Words over the picture</label>
        <label class="switch"><input type="checkbox" name="numbers" checked>Numbers</label>
      </div>
    </details>
  </div>
  <section class="live-strip" aria-label="What was said so far" hidden></section>
  <input type="file" name="file" accept="image/*,video/*" hidden aria-label="A picture or clip">
  <p class="unseen live-aloud" aria-live="polite"></p>
  <p class="live-said" role="status"></p>`;

function insecure() {
  const port = location.port ? `:${location.port}` : "";
  return `<div class="notice">
    <p><strong>No camera here, yet.</strong> Browsers give cameras and screens only to pages on https, or on the very
    machine that the server runs on. This page came from ${location.hostname} over plain http.</p>
    <p>On the server: <code>beholder serve --host 0.0.0.0 --https-self-signed</code>, then open
    <code>https://${location.hostname}${port}/ui/</code>. The browser warns once, since the server vouches for itself.
    Files work without.</p></div>`;
}
