"""The vocabulary of the generated texts. Each name has one gender here, so that pronouns fit."""

SHE = """Mira Anna Lena Sofia Emma Ada Nora Iris Clara Ruth Tara Maya Zoe Ella Hana Yuki Leila Priya Amara Ingrid Olga Rosa Carmen
Lucia Freya Dana Vera Wanda Fatima Chloe Grace Ivy June Kira Luna Naomi Petra Rania Selma Thea""".split()
HE = """Tom Ben Omar Liam Noah Finn Max Paul Oscar Hugo Ivan Kenji Ravi Diego Marco Nils Otto Pavel Raj Sami Theo Umar Victor Walt
Yusuf Zane Adam Boris Carl David Erik Felix George Henry Isaac Jack Karl Leo Milo Peter""".split()
NAMES = SHE + HE

THINGS = """apples pears plums oranges lemons cherries berries peaches melons nuts eggs carrots onions tomatoes beans pencils pens
crayons books notebooks stamps stickers cards coins marbles beads buttons shells stones toys blocks balls kites balloons ribbons
candles cookies muffins cakes candies tickets badges photos posters magazines letters envelopes bottles cups plates spoons bricks
tiles nails screws bolts boxes bags baskets flowers roses tulips trees seeds fish chickens sheep cows bees""".split()
BOXES = "boxes bags baskets crates jars trays packs cartons drawers bins".split()
COLOURS = "red blue green yellow white black brown purple orange pink grey golden".split()
PEOPLE = "friends children students players workers neighbours cousins guests teachers visitors".split()
PLACES = """shop market store bakery farm school library museum factory garden kitchen cellar office park hotel harbour
camp""".split()
ITEMS = """ticket book lamp chair table shirt jacket hat bag ball game toy cake pizza carpet notebook pen mug plate plant clock
bike tent rope bucket""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
CITIES = """Paris London Berlin Madrid Rome Vienna Prague Warsaw Oslo Helsinki Dublin Lisbon Athens Cairo Nairobi Lagos Accra
Tunis
Delhi Mumbai Tokyo Osaka Kyoto Seoul Beijing Shanghai Bangkok Hanoi Manila Jakarta Sydney Perth Auckland Toronto Montreal Boston
Chicago Denver Dallas Seattle Austin Miami Lima Quito Bogota Havana Santiago Tallinn Riga Vilnius Zurich Geneva Milan Turin Naples
Porto Seville Lyon Nice Hamburg Munich Cologne Krakow Sofia Zagreb Ankara Doha Dubai Bergen Malmo Ghent""".split()
