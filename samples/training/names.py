"""What things are called: from the label of a symbol to the words that people say.

Knows English articles, plurals and kinds; knows nothing about pictures.
"""

from dataclasses import dataclass

# Labels of the symbol sets that are no things to name, or that other things already cover.
DROPPED = set(
    """guide dog|service dog|two-hump camel|front-facing baby chick|wilted flower|leaf fluttering in wind|pig nose
black bird
map of Japan|globe with meridians|mount fuji|love hotel|Japanese post office|oncoming police car|oncoming taxi
oncoming automobile|mountain cableway|aerial tramway|suspension railway|landslide|hourglass not done|foggy|
derelict house|department store|wedding|bridge at night|national park|mountain railway|tram car|light rail|metro|train
high-speed train|monorail|motorway|construction|station|tanabata tree|pine decoration|moon viewing ceremony
reminder ribbon
cricket game|admission tickets|knot|martial arts uniform
flower playing cards|joker|speaker low volume|speaker medium volume|musical notes
mobile phone with arrow|low battery|dvd|computer disk|camera with flash|magnifying glass tilted right|orange book|ledger
page with curl|rolled-up newspaper|bookmark tabs|money with wings|chart increasing with yen|incoming envelope
envelope with arrow|outbox tray|closed mailbox with lowered flag|open mailbox with raised flag
open mailbox with lowered flag
ballot box with ballot|black nib|open file folder|card index dividers|tear-off calendar|spiral notepad|spiral calendar
round pushpin|linked paperclips|locked with pen|locked with key|hammer and pick|hammer and wrench|broken chain
nazar amulet
hamsa|placard|identification card|musical score|muted speaker|
tamale|oden|fish cake with swirl|root vegetable|curry rice|
mate|beverage box|shallow pan of food|bowl with spoon|rice cracker|clinking glasses
airplane departure|airplane arrival|small airplane|building construction|houses|office building|
convenience store|kaaba|shinto shrine|night with stars|cityscape at dusk|motor boat|
police car light|waxing crescent moon|waxing gibbous moon|waning gibbous moon
last quarter moon|waning crescent moon|new moon|new moon face|first quarter moon face|last quarter moon face|wind face
sun behind small cloud|sun behind large cloud|cloud with lightning and rain|sun behind rain cloud
umbrella with rain drops
umbrella on ground|snowman without snow|fog|globe showing Americas|globe showing Asia-Australia|milky way
mantelpiece clock|timer clock|sunrise over mountains|red paper lantern|heart suit|diamond suit|sneezing face|
woman’s sandal|clutch bag|e-mail|label|seat|
leafless tree|piñata|
motorized wheelchair|delivery truck|file folder|mirror ball|pouring liquid|funeral urn|
vertical traffic light|green book|blue book|memo|derelict|Japanese castle|railway car|old key
""".replace("\n", "|").split("|")
) | {
    f"{hour}{half}"
    for hour in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    for half in (" o’clock", "-thirty")
}

SPOKEN = {
    "monkey face": "monkey", "dog face": "dog", "cat face": "cat", "tiger face": "tiger", "horse face": "horse",
    "cow face": "cow", "pig face": "pig", "mouse face": "mouse", "rabbit face": "rabbit", "dragon face": "dragon",
    "baby chick": "chick", "spouting whale": "whale", "sauropod": "dinosaur", "T-Rex": "dinosaur", "honeybee": "bee",
    "lady beetle": "ladybug", "blowfish": "pufferfish", "spiral shell": "seashell", "ox": "bull", "boar": "wild boar",
    "ewe": "sheep", "hatching chick": "hatching chick", "bug": "caterpillar", "paw prints": "paw prints",
    "cherry blossom": "cherry blossom", "white flower": "white flower", "blossom": "flower", "lotus": "lotus flower",
    "evergreen tree": "pine tree", "deciduous tree": "tree", "sheaf of rice": "sheaf of rice", "herb": "herb",
    "empty nest": "nest", "nest with eggs": "nest with eggs", "fallen leaf": "autumn leaf",
    "red apple": "apple", "green apple": "green apple", "ear of corn": "corn cob", "hot pepper": "chili pepper",
    "leafy green": "lettuce", "ginger root": "ginger root", "brown mushroom": "mushroom", "baguette bread": "baguette",
    "cheese wedge": "piece of cheese", "poultry leg": "chicken leg", "cooking": "fried egg", "green salad": "salad",
    "canned food": "can of food", "bento box": "lunch box", "cooked rice": "bowl of rice",
    "soft ice cream": "ice cream cone",
    "ice cream": "bowl of ice cream", "roasted sweet potato": "sweet potato", "pizza": "slice of pizza",
    "glass of milk": "glass of milk", "hot beverage": "cup of coffee", "teacup without handle": "cup of tea",
    "sake": "bottle of sake", "bottle with popping cork": "bottle of champagne", "wine glass": "glass of wine",
    "cocktail glass": "cocktail", "tropical drink": "tropical drink", "beer mug": "mug of beer",
    "clinking beer mugs": "beer mugs", "cup with straw": "cup with a straw", "fork and knife with plate": "plate",
    "fork and knife": "fork and knife", "kitchen knife": "knife", "custard": "pudding", "shortcake": "slice of cake",
    "globe showing Europe-Africa": "globe", "world map": "map", "snow-capped mountain": "snowy mountain",
    "camping": "campsite", "beach with umbrella": "beach", "classical building": "museum", "house with garden": "house",
    "Tokyo tower": "tower", "Statue of Liberty": "statue", "carousel horse": "carousel horse",
    "locomotive": "steam train",
    "bullet train": "train", "tram": "tram", "fire engine": "fire truck", "automobile": "car",
    "sport utility vehicle": "car", "articulated lorry": "truck", "racing car": "race car", "motor scooter": "scooter",
    "manual wheelchair": "wheelchair", "auto rickshaw": "rickshaw", "railway track": "railway track",
    "horizontal traffic light": "traffic light", "ring buoy": "life buoy", "passenger ship": "ship",
    "flying saucer": "flying saucer", "bellhop bell": "desk bell", "luggage": "suitcase", "hourglass done": "hourglass",
    "full moon face": "moon", "full moon": "full moon", "sun with face": "sun", "ringed planet": "planet",
    "glowing star": "star", "sun behind cloud": "sun behind a cloud", "cloud with rain": "rain cloud",
    "cloud with snow": "snow cloud", "cloud with lightning": "storm cloud", "high voltage": "lightning bolt",
    "droplet": "drop of water", "water wave": "wave", "cyclone": "whirl", "jack-o-lantern": "jack-o'-lantern",
    "Japanese dolls": "dolls", "carp streamer": "carp streamer", "wrapped gift": "present", "ticket": "ticket",
    "military medal": "medal", "sports medal": "medal", "1st place medal": "gold medal",
    "2nd place medal": "silver medal",
    "3rd place medal": "bronze medal", "american football": "football", "rugby football": "rugby ball",
    "tennis": "tennis ball", "bowling": "bowling ball", "flag in hole": "golf flag", "running shirt": "running shirt",
    "bullseye": "target", "water pistol": "toy gun", "pool 8 ball": "billiard ball", "video game": "game controller",
    "game die": "die", "spade suit": "spade symbol", "club suit": "club symbol", "chess pawn": "chess pawn",
    "framed picture": "painting", "artist palette": "palette", "thread": "spool of thread", "sewing needle": "needle",
    "yarn": "ball of yarn", "one-piece swimsuit": "swimsuit", "woman’s clothes": "blouse",
    "folding hand fan": "hand fan",
    "thong sandal": "flip-flop", "running shoe": "sneaker", "hiking boot": "boot", "flat shoe": "flat shoe",
    "high-heeled shoe": "high heel", "hair pick": "comb", "graduation cap": "graduation cap", "billed cap": "cap",
    "rescue worker’s helmet": "helmet", "gem stone": "gem", "speaker high volume": "speaker",
    "studio microphone": "microphone",
    "headphone": "headphones", "musical keyboard": "piano keyboard", "mobile phone": "phone",
    "telephone receiver": "telephone receiver",
    "electric plug": "plug", "laptop": "laptop", "desktop computer": "computer", "optical disk": "disc",
    "movie camera": "movie camera",
    "film frames": "film strip", "magnifying glass tilted left": "magnifying glass", "diya lamp": "oil lamp",
    "notebook with decorative cover": "notebook", "closed book": "book", "page facing up": "sheet of paper",
    "yen banknote": "banknote", "dollar banknote": "banknote", "euro banknote": "banknote",
    "pound banknote": "banknote",
    "inbox tray": "inbox tray", "closed mailbox with raised flag": "mailbox", "postbox": "postbox", "package": "parcel",
    "chart increasing": "rising chart", "chart decreasing": "falling chart", "straight ruler": "ruler",
    "triangular ruler": "set square", "card file box": "card box", "file cabinet": "filing cabinet",
    "wastebasket": "trash can",
    "pick": "pickaxe", "crossed swords": "crossed swords", "carpentry saw": "saw", "nut and bolt": "nut and bolt",
    "balance scale": "pair of scales", "link": "chain link", "satellite antenna": "satellite dish",
    "drop of blood": "drop of blood",
    "adhesive bandage": "bandage", "couch and lamp": "couch", "roll of paper": "roll of toilet paper",
    "soap": "bar of soap",
    "headstone": "gravestone", "moai": "stone head", "dna": "DNA strand", "t-shirt": "T-shirt",
    "musical note": "musical note",
    "long drum": "conga drum", "white cane": "white cane", "television": "television", "candy": "piece of candy",
    "takeout box": "takeout box", "honey pot": "pot of honey", "fried shrimp": "fried shrimp", "dove": "dove",
    "mouse trap": "mouse trap", "lotion bottle": "lotion bottle", "alembic": "flask", "fish": "fish", "melon": "melon",
    "chestnut": "chestnut", "pea pod": "pea pod", "classical": "museum", "yo-yo": "yo-yo", "dagger": "dagger",
    "control": "controls", "wood": "log", "stop sign": "stop sign", "spider web": "spider web", "tent": "tent",
    "wheel": "wheel", "key": "key", "ear": "ear", "hut": "hut", "school": "school", "post office": "post office",
    # faces, people and others from the remaining groups, named one by one (only those here are used)
    "grinning face": "smiling face", "crying face": "crying face", "sleeping face": "sleeping face",
    "angry face": "angry face",
    "thinking face": "thinking face", "skull": "skull", "ghost": "ghost", "alien": "alien", "robot": "robot",
    "pile of poo": "pile of poo", "clown face": "clown face", "red heart": "heart", "broken heart": "broken heart",
    "baby": "baby", "boy": "boy", "girl": "girl", "man": "man", "woman": "woman", "old man": "old man",
    "old woman": "old woman", "police officer": "police officer", "construction worker": "construction worker",
    "guard": "royal guard", "detective": "detective", "princess": "princess", "prince": "prince",
    "Santa Claus": "Santa Claus",
    "mermaid": "mermaid", "snowboarder": "snowboarder", "thumbs up": "thumbs up", "eye": "eye", "mouth": "mouth",
    "footprints": "footprints", "brain": "brain", "bone": "bone", "tooth": "tooth", "nose": "nose",
    "smiling face with sunglasses": "face with sunglasses", "smiling face with heart-eyes": "face with heart eyes",
    "face with tears of joy": "laughing face", "face with medical mask": "face with a mask",
    "smiling face with halo": "face with a halo",
    "collision": "explosion", "warning": "warning sign", "no entry": "no entry sign",
    "chequered flag": "checkered flag",
    "shaved ice": "bowl of shaved ice", "steaming bowl": "bowl of noodles", "pot of food": "pot of stew",
    "stuffed flatbread": "kebab",
    "meat on bone": "meat on a bone", "cut of meat": "steak", "locked": "padlock", "unlocked": "open padlock",
    "cityscape": "city",
    "tumbler glass": "glass of whiskey", "oncoming bus": "bus", "performing arts": "theater masks",
    "rosette": "rosette",
    "dango": "skewer of dumplings", "mahjong red dragon": "mahjong tile", "black cat": "cat",
    "closed umbrella": "umbrella",
    "woman’s boot": "high boot", "woman’s hat": "sun hat", "man’s shoe": "shoe", "goal net": "goal net",
    "level slider": "slider",
    "badminton": "badminton racket", "ping pong": "ping pong paddle", "lacrosse": "lacrosse stick",
    "ice hockey": "hockey stick",
    "field hockey": "field hockey stick", "bank": "bank", "first quarter moon": "half moon",
    "folded hands": "folded hands",
    "victory hand": "victory hand", "microbe": "microbe", "postal horn": "horn", "synagogue": "synagogue",
    "falafel": "falafel",
    "bell with slash": "crossed-out bell", "hindu temple": "temple", "card index": "card index", "x-ray": "X-ray",
    "ogre": "ogre", "kiss mark": "lipstick mark", "biceps": "arm",
}  # fmt: skip
EXTRA_LABELS = {  # taken from the groups of faces, people and symbols
    "grinning face", "crying face", "sleeping face", "angry face", "thinking face", "skull", "ghost", "alien", "robot",
    "clown face", "red heart", "broken heart", "baby", "boy", "girl", "man", "woman", "old man", "old woman",
    "police officer", "construction worker", "guard", "detective", "princess", "prince", "Santa Claus", "mermaid",
    "snowboarder", "thumbs up", "eye", "ear", "nose", "mouth", "footprints", "brain", "bone", "tooth", "kiss mark",
    "winking face", "smiling face with sunglasses", "smiling face with heart-eyes", "face with tears of joy",
    "nerd face",
    "cowboy hat face", "face with medical mask", "nauseated face", "exploding head", "neutral face",
    "smiling face with halo",
    "pile of poo", "alien monster", "goblin", "ogre", "collision", "waving hand", "thumbs down", "OK hand",
    "raised fist", "victory hand",
    "clapping hands", "crossed fingers", "pirate flag", "chequered flag", "rainbow flag", "recycling symbol", "warning",
    "no entry", "check mark", "cross mark", "peace symbol", "speech balloon", "foot", "leg", "folded hands",
    "nail polish",
}  # fmt: skip
COUNTRIES = {
    "France", "Germany", "Italy", "Spain", "Japan", "China", "Canada", "Brazil", "India", "Mexico", "Sweden", "Norway",
    "Denmark", "Finland", "Switzerland", "Austria", "Belgium", "Ireland", "Portugal", "Poland", "Greece", "Turkey",
    "Ukraine", "Australia", "Argentina", "Chile", "South Korea", "South Africa", "Egypt", "Israel", "United States",
    "United Kingdom", "Jamaica", "Cuba", "Nigeria", "Kenya", "Vietnam", "Thailand", "Iceland", "Hungary",
}  # fmt: skip

# Names that are plural as they stand, and names of stuff: neither is counted.
PLURAL_NAMES = set(
    """paw prints|grapes|cherries|blueberries|peanuts|beans|pancakes|french fries|beer mugs|chopsticks|glasses
sunglasses
goggles|jeans|gloves|socks|briefs|shorts|scissors|skis|books|chains|bubbles|ballet shoes|shopping bags|dolls|headphones
maracas|theater masks|clapping hands|folded hands|crossed fingers|control knobs|hot springs|crossed swords|fireworks
sparkles|nesting dolls|footprints|clinking glasses|hot springs|prayer beads|thumbs up
pair of scales""".replace("\n", "|").split("|")
) - {"pair of scales", "thumbs up"}
STUFF_NAMES = set(
    """bread|bacon|butter|salt|ice|popcorn|sushi|spaghetti|fire|garlic|broccoli|lettuce|ginger root|fondue|salad
bubble tea
pudding|fried shrimp|lipstick|rain|sand""".replace("\n", "|").split("|")
)
IRREGULAR = {
    "mouse": "mice", "computer mouse": "computer mice", "goose": "geese", "ox": "oxen", "sheep": "sheep",
    "fish": "fish",
    "tropical fish": "tropical fish", "pufferfish": "pufferfish", "deer": "deer", "bison": "bison", "moose": "moose",
    "squid": "squid", "shrimp": "shrimp", "die": "dice", "knife": "knives", "wolf": "wolves",
    "maple leaf": "maple leaves",
    "autumn leaf": "autumn leaves", "scarf": "scarves", "tooth": "teeth", "man": "men", "woman": "women",
    "old man": "old men",
    "old woman": "old women", "slice of pizza": "slices of pizza", "slice of cake": "slices of cake", "loaf": "loaves",
    "fork and knife": "sets of fork and knife", "nut and bolt": "nuts and bolts", "cactus": "cactuses",
    "ox cart": "ox carts",
    "nest with eggs": "nests with eggs", "sun behind a cloud": "suns behind clouds",
    "cup with a straw": "cups with a straw",
    "bow and arrow": "bows and arrows", "meat on a bone": "pieces of meat on a bone", "canned food": "cans",
    "foot": "feet", "snowman": "snowmen", "octopus": "octopuses",
    "aircraft": "aircraft", "stone head": "stone heads", "potato": "potatoes", "tomato": "tomatoes", "mango": "mangoes",
    "volcano": "volcanoes", "mosquito": "mosquitoes",
}  # fmt: skip


@dataclass(frozen=True)
class Noun:
    """The name of a thing and its kind (`animal`, `fruit`, …; an empty string where there is no plain word)."""

    name: str
    kind: str = ""

    @property
    def is_plural(self) -> bool:
        return self.name in PLURAL_NAMES

    @property
    def countable(self) -> bool:
        return not self.is_plural and self.name not in STUFF_NAMES and not self.name.startswith("flag of")

    @property
    def verb(self) -> str:
        return "are" if self.is_plural else "is"

    def some(self, adjective: str = "") -> str:
        """With the indefinite article: "a cat", "an orange cat", "some grapes"."""
        phrase = f"{adjective} {self.name}" if adjective else self.name
        if self.is_plural or self.name in STUFF_NAMES:
            return f"some {phrase}"
        if phrase.startswith("flag of") or phrase in ("Santa Claus", "lipstick mark"):
            return f"the {phrase}" if phrase.startswith("flag") else phrase
        return f"{article(phrase)} {phrase}"

    def plural(self) -> str:
        return pluralise(self.name)


def article(phrase: str) -> str:
    """ "a" or "an", by the sound of the first letters."""
    first = phrase.lower()
    if first.startswith(("uni", "use", "one", "eu", "ukulele", "yo", "u-")):
        return "a"
    if first.startswith(("hour", "honest", "x-ray")):
        return "an"
    return "an" if first[0] in "aeiou" else "a"


def pluralise(name: str) -> str:
    """The plural of a noun phrase whose head comes first before " of " or " with ", else last."""
    if name in PLURAL_NAMES:
        return name
    if name in IRREGULAR:
        return IRREGULAR[name]
    for joint in (" of ", " with ", " behind ", " on "):
        if joint in name:
            head, rest = name.split(joint, 1)
            return pluralise(head) + joint + rest
    if name.endswith(("s", "x", "z", "ch", "sh")):
        return name + "es"
    if name.endswith("y") and name[-2] not in "aeiou":
        return name[:-1] + "ies"
    if name.endswith("man"):
        return name[:-3] + "men"
    return name + "s"


# Subgroups of the symbol tables -> a word that people use for the kind.
KINDS = {
    "animal-mammal": "animal", "animal-bird": "bird", "animal-amphibian": "animal", "animal-reptile": "reptile",
    "animal-marine": "sea animal", "animal-bug": "insect", "plant-flower": "flower", "plant-other": "plant",
    "food-fruit": "fruit", "food-vegetable": "vegetable", "food-prepared": "food", "food-asian": "food",
    "food-sweet": "sweet",
    "drink": "drink", "food-marine": "sea animal", "transport-ground": "vehicle", "transport-water": "boat",
    "transport-air": "aircraft", "place-building": "building", "clothing": "piece of clothing",
    "music": "musical instrument",
    "musical-instrument": "musical instrument", "tool": "tool", "sport": "sports item", "household": "household item",
    "computer": "electronic device", "phone": "electronic device", "writing": "writing tool", "science": "science tool",
    "flag": "flag", "country-flag": "flag", "time": "clock", "money": "money", "book-paper": "paper item",
    "mail": "mail item",
    "person": "person", "person-role": "person",
}  # fmt: skip
NOT_OF_KIND = {  # members of a subgroup that people would not call by the kind's word
    "paw prints", "feather", "wing", "spider web", "seashell", "nest", "nest with eggs", "wheel", "bus stop",
    "fuel pump",
    "traffic light", "stop sign", "railway track", "anchor", "life buoy", "parachute", "satellite", "rock", "brick",
    "log",
    "fountain", "crown", "ring", "gem", "lipstick", "prayer beads", "shopping bags", "hand fan", "comb", "plate",
    "knife", "spoon",
    "fork and knife", "chopsticks", "jar", "amphora", "musical note", "headphones", "microphone", "radio",
    "speaker", "ice", "baby bottle",
    "spider", "scorpion", "worm", "snail", "flying saucer", "rocket", "hourglass", "playground slide",
    "barber pole", "toy gun",
    "police officer", "thumbs up", "white cane", "bomb", "coffin", "cigarette", "gravestone", "stone head", "briefs",
    "desk bell", "suitcase", "bat", "turtle", "crocodile", "skateboard", "roller skate",
}  # fmt: skip
ALSO = {  # wider kinds, for yes/no questions
    "bird": ("bird", "animal"), "reptile": ("animal",), "sea animal": ("animal",), "insect": ("insect", "animal"),
    "fruit": ("fruit", "food"), "vegetable": ("vegetable", "food"), "sweet": ("sweet", "food"), "flower": ("flower",
    "plant"),
    "boat": ("boat", "vehicle"), "aircraft": ("aircraft", "vehicle"),
}  # fmt: skip


def kinds_of(noun: Noun) -> tuple[str, ...]:
    """The kind words that truly apply to the noun, narrowest first."""
    if not noun.kind or noun.name in NOT_OF_KIND:
        return ()
    return ALSO.get(noun.kind, (noun.kind,))
