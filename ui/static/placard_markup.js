// What <beholder-placard> is made of.

export const MARKUP = `
  <div class="placard">
    <div class="placard-hang">
      <div class="placard-frame"><div class="placard-mat">
        <img class="placard-picture" alt="" hidden><video class="placard-camera" muted playsinline hidden></video>
        <div class="placard-nothing" aria-hidden="true"></div>
      </div></div>
      <p class="placard-recording" hidden><span aria-hidden="true"></span>The camera is on</p>
    </div>
    <div class="placard-tools" role="toolbar" aria-label="Placard">
      <input class="placard-file unseen" type="file" accept="image/*" tabindex="-1" aria-hidden="true">
      <button type="button" class="button primary placard-choose">Choose a picture</button>
      <button type="button" class="button placard-use-camera" aria-pressed="false">Use the camera</button>
      <button type="button" class="button placard-again" hidden>Write it again</button>
      <button type="button" class="button placard-wall">Hang it on the wall</button>
    </div>
    <div class="placard-side">
      <article class="label" aria-label="Wall label"><p class="label-writer" hidden>Written by a machine that looked at the
        picture. It can be mistaken.</p></article>
      <p class="notice bad placard-error" role="alert" hidden></p>
      <figure class="placard-code" hidden><a target="_blank" rel="noopener"><img alt="QR code of the label's own page"></a>
        <figcaption></figcaption></figure>
      <p class="unseen" aria-live="polite"></p>
    </div>
  </div>`;

/** The parts that are spoken of by name: `.placard-…`. */
export const PARTS = ["picture", "camera", "nothing", "recording", "error", "code", "file", "choose", "use-camera", "again", "wall"];
