// Tiles of matrices (AMX): 8-bit weights by up to sixteen tokens as fast as their weights are read, and attention of as
// many queries.
//
// A tile holds sixteen rows of 64 bytes. Of weights it is 64 inputs by 16 outputs, four inputs side by side:
//
//     [32 outputs][64 inputs][2 tiles][16 fours of inputs][16 outputs][4 inputs]        of int8
//
// Inputs are the 16-bit fixed point of products.h, its upper and lower bytes in tiles of their own, a token a row: the
// products of both add up in 32 bits, 256 times the upper one's and the lower one's. So sums are those of products.h to
// the bit, whatever overflows between.

// setup.py says 0 where the assembler does not know them: gcc 11 beside binutils before 2.35.
#if !defined(HAS_TILES)
#if defined(__clang__) || __GNUC__ >= 11
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif
#endif

#if HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if HAS_TILES
#define FOR_TILES __attribute__((target("amx-tile,amx-int8,amx-bf16")))

constexpr int TILE = 1024;          // bytes
constexpr int TILE_TOKENS = 16;     // rows
constexpr int TILE_INPUTS = 64;     // bytes of a row
constexpr int TILE_OUTPUTS = 32;    // of two tiles of weights, whose inputs are loaded once
constexpr int TILES_AHEAD = 8;      // tiles of weights that are fetched before they are needed

// gcc does not know that instructions of tiles read memory: what is there must have been written.
void written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// How many rows this thread's tiles have: of sums and inputs as many as there are tokens; 0 if it has none.
thread_local int tile_rows = 0;

FOR_TILES void use_tiles(int rows) {
    if (rows == tile_rows) return;
    struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) shape.bytes[i] = TILE_INPUTS, shape.rows[i] = uint8_t(i < 6 ? rows : 16);
    written(&shape);
    _tile_loadconfig(&shape);
    tile_rows = rows;
}

// Tiles that are in use are saved and restored with the thread, and keep its core awake.
FOR_TILES void leave_tiles() {
    if (tile_rows) _tile_release();
    tile_rows = 0;
}

// Whether the operating system lets this process use them, which is asked for once (Linux 5.16): it does not while any
// thread has a stack for signals that has no room for them, and what a model computes would depend on when that ends.
bool may_use_tiles() {
    constexpr int REQUEST = 0x1023, DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool may = syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
    return may;
}

// Sums of `rows` tokens by 32 outputs over `steps` times 64 inputs, upper bytes and lower ones of both tiles:
// (4, 16, 16). `x`: a token's upper bytes, its lower ones `inputs` behind them, the next token's twice as far.
FOR_TILES void add_tiles(const char* weights, const char* x, int inputs, int steps, bool is_new, int32_t* sums) {
    written(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < steps; step++, weights += 2 * TILE, x += TILE_INPUTS) {
        if (is_new)
            for (int line = 0; line < 2 * TILE; line += 64)
                _mm_prefetch(weights + TILES_AHEAD * TILE + line, _MM_HINT_T0);
        _tile_loadd(4, x, 2 * inputs);
        _tile_loadd(5, x + inputs, 2 * inputs);
        _tile_loadd(6, weights, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbusd(1, 5, 6);
        _tile_loadd(7, weights + TILE, 64);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

// Scores of as many queries as tiles have rows for 16 * vectors keys. `query`: bfloat16, `stride` bytes each; `keys`:
// in columns, each sixteen of keys `columns` bytes behind the one before; `scores`: a row of 64 for each query.
FOR_TILES void score_tiles(const char* query, int stride, int steps, const char* keys, int columns, int vectors,
                           float* scores) {
    written(query);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < steps; step++, query += 64, keys += TILE) {
        _tile_loadd(4, query, stride);
        _tile_loadd(6, keys, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (vectors == 1) continue;
        _tile_loadd(7, keys + columns, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (vectors == 2) continue;
        _tile_loadd(6, keys + 2 * columns, 64);
        _tile_dpbf16ps(2, 4, 6);
        if (vectors == 3) continue;
        _tile_loadd(7, keys + 3 * columns, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, scores, 256);
    if (vectors > 1) _tile_stored(1, scores + 16, 256);
    if (vectors > 2) _tile_stored(2, scores + 32, 256);
    if (vectors > 3) _tile_stored(3, scores + 48, 256);
}

// Adds values of 32 * steps keys, up to 64 dimensions, to the sums of as many queries as tiles have rows. `upper` and
// `lower`: bfloat16 whose sums are the weights, 128 bytes a query; `values`: of each 16 dimensions two tiles.
FOR_TILES void value_tiles(const char* upper, const char* lower, int steps, const char* values, int tiles, float* sums,
                           int stride) {
    written(upper);
    _tile_loadd(0, sums, stride);
    if (tiles > 1) _tile_loadd(1, sums + 16, stride);
    if (tiles > 2) _tile_loadd(2, sums + 32, stride);
    if (tiles > 3) _tile_loadd(3, sums + 48, stride);
    for (int step = 0; step < steps; step++, upper += 64, lower += 64, values += TILE) {
        _tile_loadd(4, upper, 128);
        _tile_loadd(5, lower, 128);
        _tile_loadd(6, values, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(0, 5, 6);
        if (tiles == 1) continue;
        _tile_loadd(7, values + 2 * TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(1, 5, 7);
        if (tiles == 2) continue;
        _tile_loadd(6, values + 4 * TILE, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (tiles == 3) continue;
        _tile_loadd(7, values + 6 * TILE, 64);
        _tile_dpbf16ps(3, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, stride);
    if (tiles > 1) _tile_stored(1, sums + 16, stride);
    if (tiles > 2) _tile_stored(2, sums + 32, stride);
    if (tiles > 3) _tile_stored(3, sums + 48, stride);
}
#else
void leave_tiles() {}
bool may_use_tiles() { return false; }
#endif

}  // namespace
