"""Personas: short descriptions of the people whose requests a model is asked to write.

SAO shows the model one persona a row and asks for one request that this person might send
(`pipelines/sao.py`). The built-in sampler below puts personas together from attributes written
for this project (a list of the user's own comes through `pipelines.sources`). Persona `index`
depends on the seed and the index alone, so a run of 1,000 grows to 10,000 with its first 1,000
rows unchanged.
"""

import hashlib
from typing import Any

__all__ = ["builtin", "distinct", "persona"]

# Every attribute in a list must read well beside every attribute it can meet, so people whose
# lives differ are kept in groups (GROUPS). An interest is never someone's occupation, no hobby
# needs snow or a sea, and only land and coast tie an occupation to a place. Changing a list changes
# every persona and so the identity of runs: `test_first_ten` is there to make that deliberate.

# fmt: off
# Occupations: employed, found in any town.
STAFF = (
    "A district nurse", "A midwife", "A hospital pharmacist", "An ambulance paramedic",
    "A physiotherapist", "A general practitioner", "A dental hygienist",
    "An occupational therapist", "A speech therapist", "A radiographer", "A hospice nurse",
    "A hospital porter", "An optician", "A dietitian", "A hospital lab technician",
    "A clinical psychologist", "A veterinary nurse", "A primary school teacher",
    "A chemistry teacher", "A mathematics teacher", "A history teacher", "A kindergarten teacher",
    "A special needs teacher", "A school librarian", "A deputy head teacher", "A school caretaker",
    "A firefighter", "A police officer", "A municipal gardener", "A social worker", "A court clerk",
    "A civil registrar", "A building inspector", "A food safety inspector", "A tax officer",
    "A public librarian", "A waste collection supervisor", "A water treatment operator",
    "A probation officer", "A postal worker", "An emergency call handler", "A youth worker",
    "A local archivist", "A public prosecutor", "A public defender", "A court usher",
    "A housing officer", "A prison officer", "A bus driver", "A bus mechanic", "A lorry driver",
    "A delivery courier", "A warehouse supervisor", "A supermarket manager", "A hotel receptionist",
    "A bank clerk", "An insurance claims handler", "A power line technician",
    "A solar panel installer", "A lift technician", "A factory quality inspector",
    "A textile machine operator", "A welder", "A bricklayer", "A crane operator",
    "A civil engineer", "A land surveyor", "A payroll clerk", "An accountant",
    "A call centre agent", "A network administrator", "A software developer", "A web developer",
    "An IT support technician", "A data analyst", "A school canteen cook",
    "A sports centre manager", "A newspaper reporter", "A printing press operator",
    "A cinema projectionist", "A museum guide",
)

# Occupations: employed, found in large cities.
SPECIALISTS = (
    "A family lawyer", "An air traffic controller", "A flight attendant", "An airline pilot",
    "A museum curator", "A neurologist", "A surgical nurse", "A pathologist", "An epidemiologist",
    "A biostatistician", "A genetics researcher", "A climate scientist", "A particle physicist",
    "A materials scientist", "A linguistics researcher", "A law lecturer", "A statistics lecturer",
    "An immunology researcher", "A mechanical engineer", "A structural engineer",
    "A traffic engineer", "An urban planner", "A robotics engineer", "A chip designer",
    "A machine learning engineer", "A security analyst", "A database administrator",
    "A game designer", "A patent attorney", "A human rights lawyer", "A labour lawyer",
    "A diplomat", "A parliamentary researcher", "An economist", "An investment analyst",
    "A forensic scientist", "A toxicologist", "A theatre stage manager", "A theatre costume maker",
    "An orchestra librarian", "A television news editor", "A documentary film editor",
    "A book editor", "A dictionary editor", "A hotel pastry chef", "A zoo veterinarian",
)

# Occupations: self-employed, found in any town.
OWNERS = (
    "A carpenter", "An electrician", "A plumber", "A roofer", "A stonemason", "A tailor",
    "A shoemaker", "A watchmaker", "A bicycle mechanic", "A locksmith", "A hairdresser", "A barber",
    "A florist", "A street food vendor", "A café owner", "A restaurant owner", "A caterer",
    "A bookbinder", "A potter", "A glassblower", "A jeweller", "A furniture restorer",
    "A piano tuner", "A violin maker", "A guitar teacher", "A violin teacher",
    "A wedding photographer", "A portrait painter", "A book illustrator", "A graphic designer",
    "A freelance translator", "A freelance interpreter", "A copywriter", "A puppeteer",
    "A sound engineer", "A landscape gardener", "An interior designer", "A house painter",
    "A tiler", "A car mechanic", "A driving instructor", "A taxi driver", "A tour guide",
    "A yoga teacher", "A personal trainer", "A tennis coach", "A dog trainer", "A bookshop owner",
    "A grocery shop owner", "An estate agent", "An event planner", "A mediator", "A career coach",
    "A tattoo artist", "A sign painter", "An upholsterer", "A ballet teacher",
    "A karate instructor", "An independent app developer",
)

# Occupations of the countryside.
LAND = (
    "A dairy farmer", "A vegetable grower", "A fruit grower", "A poultry farmer", "A goat farmer",
    "A beekeeper", "A large-animal veterinarian", "A farm equipment mechanic", "A seed grower",
    "A tree nursery owner", "An irrigation technician", "A well driller", "A forest ranger",
    "A forestry worker", "A postal carrier", "A travelling health worker",
    "An agricultural adviser", "A soil scientist", "A hydrologist", "A farm cooperative manager",
    "A grain miller", "A mobile library driver", "A mushroom grower",
)

# Occupations of the coast.
SEA = (
    "A harbour pilot", "A ferry captain", "A marine biologist", "A fishmonger", "A boatbuilder",
    "A coastguard officer", "A diving instructor", "A ship's engineer", "A trawler skipper",
    "A customs officer", "A sailmaker", "A hydrographic surveyor", "An oyster farmer",
    "A ship's cook", "A marine electrician", "A lifeguard",
)

# Not (or no longer) at work.
STUDENTS = (
    "An architecture student", "A nursing student", "A medical student", "A dentistry student",
    "A pharmacy student", "A veterinary student", "A law student", "A civil engineering student",
    "A mechanical engineering student", "An electrical engineering student",
    "A computer science student", "A mathematics student", "A statistics student",
    "A physics student", "A chemistry student", "A biology student", "A geology student",
    "A geography student", "An environmental science student", "An agriculture student",
    "A food science student", "A sports science student", "An economics student",
    "A business student", "An accounting student", "A political science student",
    "A sociology student", "An anthropology student", "An archaeology student",
    "A psychology student", "A linguistics student", "A literature student", "A history student",
    "A philosophy student", "A music student", "A fine arts student", "A film student",
    "A design student", "A journalism student", "A translation student",
    "A teacher training student", "A social work student",
)
PUPILS = (
    "A secondary school pupil", "A high school student",
    "A sixteen-year-old at a vocational school", "A fifteen-year-old school pupil",
    "A seventeen-year-old in the last year of school", "A pupil at a music-focused school",
    "A pupil at a sports-focused school", "A pupil at a bilingual school",
    "A pupil at a large public school", "A pupil at a science-focused school",
)
RETIRED = (
    "A retired bus driver", "A retired train driver", "A retired postal worker",
    "A retired chemistry teacher", "A retired midwife", "A retired judge", "A retired electrician",
    "A retired bank manager", "A retired firefighter", "A retired tailor",
    "A retired civil engineer", "A retired journalist", "A retired steelworker", "A retired cook",
    "A retired telephone operator", "A retired librarian", "A retired nurse", "A retired physicist",
    "A retired police officer", "A retired airline pilot", "A retired shopkeeper",
    "A retired translator", "A retired agricultural engineer",
)
HOME = (
    "A parent of two young children", "A parent of twins", "A single parent of a teenager",
    "A stay-at-home parent", "A foster parent", "A parent of three school-age children",
    "An expectant parent", "A grandparent raising two grandchildren",
    "A full-time carer for an elderly relative", "A carer for a seriously ill partner",
    "A job seeker", "A former shop manager between jobs", "A volunteer at a food bank",
    "A volunteer at a refuge for families", "A newcomer from abroad",
)

# Places.
CITIES = (
    "in Porto", "in Lyon", "in Glasgow", "in Leeds", "in Ghent", "in Leipzig", "in Cologne",
    "in Zurich", "in Turin", "in Bilbao", "in Seville", "in Gothenburg", "in Tampere", "in Riga",
    "in Kraków", "in Brno", "in Ljubljana", "in Budapest", "in Cluj-Napoca", "in Thessaloniki",
    "in Istanbul", "in Ankara", "in Tbilisi", "in Yerevan", "in Almaty", "in Tashkent", "in Amman",
    "in Cairo", "in Tunis", "in Casablanca", "in Accra", "in Lagos", "in Nairobi", "in Kampala",
    "in Kigali", "in Addis Ababa", "in Lusaka", "in Johannesburg", "in Mumbai", "in Pune",
    "in Bengaluru", "in Kolkata", "in Dhaka", "in Lahore", "in Kathmandu", "in Hanoi", "in Bangkok",
    "in Kuala Lumpur", "in Jakarta", "in Bandung", "in Manila", "in Taipei", "in Seoul",
    "in Daejeon", "in Osaka", "in Sapporo", "in Chengdu", "in Wuhan", "in Ulaanbaatar",
    "in Melbourne", "in Adelaide", "in Wellington", "in Toronto", "in Winnipeg", "in Montreal",
    "in Chicago", "in Pittsburgh", "in Atlanta", "in Denver", "in Houston", "in Mexico City",
    "in Guadalajara", "in Panama City", "in Medellín", "in Bogotá", "in Quito", "in Lima",
    "in La Paz", "in Santiago", "in Buenos Aires", "in Montevideo", "in São Paulo",
    "in Belo Horizonte", "in Asunción",
)
TOWNS = (
    "in a market town in Wales", "in an old mill town in northern England",
    "in a small town in Brittany", "in a small town in the Black Forest",
    "in a spa town in Bohemia", "in a small town in eastern Poland",
    "in a small town in Transylvania", "in a hill town in Umbria", "in a small town in Andalusia",
    "in a small town in Lapland", "in a small town in central Anatolia",
    "in a small town in the Atlas Mountains", "in a small town in northern Ghana",
    "in a market town in western Kenya", "in a lakeside town in Malawi",
    "in a small town in the Eastern Cape", "in a small town in Rajasthan",
    "in a small town in Kerala", "in a small town in Punjab", "in a hill town in Nepal",
    "in a small town in northern Laos", "in a small town in central Vietnam",
    "in a small town in Hokkaido", "in a county town in Yunnan",
    "in a small town on the Kazakh steppe", "in a small town in inland Queensland",
    "in a small town on New Zealand's South Island", "in a small town in Saskatchewan",
    "in a former mining town in Montana", "in a river town in Iowa", "in a small town in Vermont",
    "in a small town in southern Texas", "in a small town in Oaxaca",
    "in a highland town in Guatemala", "in a small town in the Colombian coffee region",
    "in a small town in the Peruvian Andes", "in a small town in Patagonia",
    "in a small town in Minas Gerais", "in a river town in the Brazilian Amazon",
)
PORTS = (
    "in Bergen", "in Aberdeen", "in Rotterdam", "in Gdańsk", "in Marseille", "in Trieste",
    "in Split", "in Izmir", "in Alexandria", "in Dakar", "in Mombasa", "in Durban", "in Kochi",
    "in Colombo", "in Penang", "in Cebu City", "in Busan", "in Nagasaki", "in Kaohsiung",
    "in Auckland", "in Hobart", "in Halifax", "in Seattle", "in Galveston", "in Veracruz",
    "in Cartagena", "in Guayaquil", "in Valparaíso", "in Recife",
    "in a small port on the west coast of Ireland", "in a fishing town on the Norwegian coast",
    "in a coastal town in Maine", "in a fishing town in Galicia", "in a small port on Crete",
)
COUNTRYSIDE = (
    "in a village in the Scottish Borders", "in a village in Normandy", "in rural Denmark",
    "in a village in Bavaria", "in the countryside outside Siena", "in a village in Extremadura",
    "in a village in Thessaly", "in a valley in the Carpathians", "in a village in Armenia",
    "in the Fergana Valley", "in a village in Gujarat", "in a village in Tamil Nadu",
    "in a village in the hills of Nepal", "in a village in northern Thailand",
    "in a village on Java", "in rural Hunan", "in rural Nagano", "in the South Korean countryside",
    "in the Ethiopian highlands", "in the Kenyan highlands", "in a village in Uganda",
    "in a village in Burkina Faso", "in rural Limpopo", "in rural Tasmania",
    "in the Waikato region of New Zealand", "in rural Manitoba", "in rural Wisconsin",
    "in rural Oregon", "in a village in Chiapas", "in a village in the Ecuadorian highlands",
    "in the Uruguayan countryside", "in rural Paraná",
)

# Experience.
STAFF_NEW = (
    "with only a few weeks in the job", "with three months in the job",
    "with half a year in the job", "with not quite a year in the job",
    "with a former career in another field",
)
OWNER_NEW = (
    "with only a few weeks of self-employment behind them",
    "with three months of self-employment behind them",
    "with half a year of self-employment behind them",
    "with not quite a year of self-employment behind them", "with a former career in another field",
)
OUTDOOR_NEW = (
    "with only a few weeks of experience", "with three months of experience",
    "with half a year of experience", "with not quite a year of experience",
    "with a former career in another field",
)
SEASONED = (
    "with about six years of experience", "with about ten years of experience",
    "with some fifteen years of experience", "with more than twenty years of experience",
    "with nearly thirty years of experience", "with long experience in two countries",
)
STUDIES = (
    "with one year of study behind them", "with half of the degree done",
    "with one year of the degree left", "with a first degree in another field",
    "with a part-time job on the side",
)
SCHOOLING = (
    "with good marks in languages", "with a weak spot in chemistry", "with a talent for drawing",
    "with a good head for numbers", "with little patience for homework",
)
AFTER_WORK = (
    "with nearly forty years of working life behind them",
    "with only a few months of retirement behind them", "with plenty of practical knowledge",
    "with more free time than expected", "with three grown-up children",
)
AT_HOME = (
    "with little time to spare", "with a tight budget", "with a background in office work",
    "with helpful neighbours", "with few relatives nearby",
)

# Interests, as gerunds: they follow HOBBY_VERBS.
INTERESTS = (
    "restoring old radios", "restoring vintage typewriters", "refurbishing old game consoles",
    "building model railways", "building model aeroplanes", "building doll's houses",
    "building kites", "building a home weather station", "soldering small synthesisers",
    "programming pocket calculators", "contributing to an open map of the world",
    "editing articles in an online encyclopaedia", "collecting postage stamps",
    "collecting old maps", "collecting vinyl records", "collecting proverbs",
    "collecting folk songs", "collecting minerals", "solving cryptic crosswords",
    "solving jigsaw puzzles", "inventing logic puzzles", "solving sliding puzzles at speed",
    "playing chess online", "playing go", "playing mahjong", "playing cooperative board games",
    "playing tabletop role-playing games", "playing turn-based strategy games",
    "designing card games", "taking part in quiz nights", "performing card tricks", "juggling",
    "folding origami", "growing bonsai trees", "growing orchids", "growing cacti",
    "keeping tropical fish", "watching birds", "recording birdsong", "identifying moths",
    "counting butterflies for a citizen science project", "pressing wild flowers",
    "sketching trees", "stargazing with a small telescope", "tracing the family tree",
    "reading detective novels", "reading science fiction", "reading travel diaries",
    "reading about polar expeditions", "reading about shipwrecks", "reading poetry aloud",
    "reading comics from around the world", "writing haiku", "writing short stories",
    "writing letters to pen friends", "writing song lyrics", "keeping a nature diary",
    "practising calligraphy", "knitting socks", "crocheting toy animals", "quilting",
    "embroidering", "weaving on a small loom", "weaving baskets", "dyeing yarn with plants",
    "making paper by hand", "making linocut prints", "making mosaics", "making candles",
    "making soap", "making leather belts", "making stop-motion films", "carving wooden spoons",
    "painting watercolours", "painting miniature figures", "drawing comics",
    "drawing maps of imaginary cities", "sketching strangers in cafés", "photographing insects",
    "photographing old shop signs", "playing the accordion", "playing the cello",
    "playing the trumpet", "playing the ukulele", "playing in a brass band",
    "playing in a percussion group", "singing in a choir", "composing electronic music",
    "listening to jazz records", "listening to radio plays", "watching silent films",
    "watching travel programmes", "acting in amateur theatre", "doing improvised comedy",
    "dancing tango", "dancing salsa", "running long distances", "cycling long distances", "hiking",
    "orienteering", "geocaching", "bouldering at an indoor wall", "fencing", "practising archery",
    "practising tai chi", "playing table tennis", "playing badminton", "playing volleyball",
    "playing five-a-side football", "going on long walks", "making jam", "pickling vegetables",
    "making fresh pasta", "making dumplings", "blending herbal teas",
    "cooking from a grandparent's notebook", "cooking over an open fire", "learning Esperanto",
    "walking dogs from an animal shelter", "helping strangers at a repair café",
)

# Tones.
TONES = (
    "writes briefly and wants concrete steps", "writes long, friendly messages and likes examples",
    "writes bluntly and dislikes small talk", "writes in short bursts from a phone",
    "writes in lower case with hardly any commas",
    "writes formally and chooses every word with care", "writes warmly and always says thank you",
    "writes with dry humour, even about serious things",
    "writes in plain words and wants to know the reasons",
    "writes in a second language and prefers simple sentences",
    "writes carefully structured messages with numbered points",
    "writes as if talking to an old friend", "writes late in the evening, in long paragraphs",
    "asks one precise question at a time", "asks three questions at once",
    "asks hesitantly and then follows up sharply", "asks for sources and checks them",
    "asks for two or three alternatives every time",
    "gives a lot of background before the question",
    "gives too little background and has to be asked", "thinks aloud and changes direction halfway",
    "likes numbers, tables and clear limits", "likes comparisons with everyday things",
    "wants the short answer first and the details after",
    "wants honest criticism rather than praise", "wants to understand a thing fully before acting",
    "is sceptical of easy answers and says so", "is impatient with jargon and long introductions",
    "is enthusiastic and uses many exclamation marks", "is cautious and asks what could go wrong",
)

# Situations that anyone grown up can be in, then those of one group each.
LIFE = (
    "is moving to a smaller home next month",
    "is packing for a move to another part of the country",
    "is trying to sleep better after a stressful year",
    "is trying to spend less time on social media",
    "is trying to make a few real friends in the neighbourhood",
    "is helping to plan a cousin's wedding on a modest budget",
    "is planning a long journey with an old friend", "is planning a surprise party for a neighbour",
    "is preparing a speech for a friend's birthday",
    "is organising a neighbourhood party for the first time",
    "is hosting relatives from abroad for two weeks",
    "is looking after a relative's two cats for a month",
    "is sorting the papers of a relative who has died",
    "is caring for a relative after an operation",
    "is learning sign language to talk with a new neighbour", "is learning to live with migraines",
    "is getting used to a much smaller kitchen", "is recovering from a long bout of flu",
    "is furnishing a room with almost no money",
    "is settling a quarrel about noise with a neighbour", "is on a waiting list for minor surgery",
    "has adopted an elderly dog from a shelter",
    "has a strange noise in the house that nobody can explain",
    "has been told by a doctor to eat less salt", "has been told by a doctor to rest more",
    "is owed a refund for a cancelled flight",
    "has inherited a box of old letters in an unfamiliar language",
    "has lost a wallet with every card in it", "has been elected treasurer of a small club",
    "has promised to cook for twenty guests next weekend",
    "is tired of cooking the same three dinners",
    "wants to write down the family history for younger relatives",
    "wants to apologise to an old friend after years of silence",
    "wants to halve the household's electricity use",
)
WORK = (
    "is rewriting a checklist that nobody follows",
    "is looking for a better way to keep track of tasks",
    "is writing a plain-language guide to the most common questions",
    "is noting down every task of the day for a month",
    "is drafting an awkward email that has been put off for a week",
    "is tired after a long run of early mornings",
    "is collecting ideas for making the work less tiring",
    "has made a small but embarrassing mistake at work",
    "has to write a short text about the job for a local brochure",
    "wants to cut down on paperwork", "wants to explain the job better to puzzled relatives",
)
AMONG_STAFF = (
    "is getting used to new software that everyone complains about",
    "is looking for a tactful way to refuse extra work",
    "is preparing for an important meeting next week",
    "is working out a fair holiday plan with the team", "has a teammate who never stops talking",
    "has taken over the work of a colleague who left suddenly",
    "has to take the minutes of a difficult meeting", "has a boss with a new idea every morning",
    "has had a disagreement with a colleague that still hurts",
    "has volunteered to organise the team's summer outing",
    "wants to propose a change without offending anyone",
)
AS_NEW_STAFF = (
    "is trying to remember dozens of new names",
    "is working through a thick manual in the evenings",
    "is about to have a first performance review", "is unsure which questions are all right to ask",
    "has just been given a first task without supervision",
    "has found an error in the training material",
    "wants to make a good impression at the first big meeting",
)
AS_SEASONED_STAFF = (
    "would like to try a different role in the same organisation",
    "is back at work after a long illness", "is training three new colleagues",
    "is applying for a job for the first time in years",
    "is standing in as team leader until the summer",
    "is handing over to a successor little by little", "has just turned down a promotion",
    "has to give a five-minute speech at a colleague's farewell",
    "has to tell the team some bad news", "wants to change careers without starting from nothing",
)
AS_NEW_OWNER = (
    "is looking for the first regular customers", "is choosing a name for the business",
    "is writing the text of a first leaflet",
    "is waiting for a late payment from the first big customer",
    "is keeping every receipt in a shoebox for now", "is still unsure how to set prices",
    "has just received the first complaint from a customer",
    "has to explain the business plan to a doubtful bank",
    "wants to know which insurance is really needed",
)
AS_SEASONED_OWNER = (
    "is thinking of taking on a first employee", "is raising prices for the first time in years",
    "is looking for someone to take over the business one day",
    "is mentoring a beginner who learns in a quite different way",
    "is arguing with a customer about an unpaid bill", "has more requests than hours in the week",
    "has lost the biggest customer of the past five years",
    "has been asked to give a talk at the public library", "has received an unfair review online",
    "wants to take a whole month off for the first time in years",
)
AS_SEASONED = (
    "is thinking of working fewer hours",
    "is wondering how the job will change in the next ten years",
    "has been asked to talk about the job on local radio",
    "has agreed to show a teenager around for a week of work experience",
    "has been asked to write down every trick of the trade",
    "wants to get better at explaining things to beginners",
)
OUTDOORS = (
    "has to find a stand-in for two weeks", "has received a thick official letter about new rules",
    "is worried about ever hotter summers", "is waiting for better weather after two stormy weeks",
    "is comparing two offers for a used pickup truck", "is updating an old safety plan",
    "is applying for a small grant to replace old equipment",
    "is digitising a drawer full of handwritten logbooks",
    "is preparing a display for a local fair", "wants to read up on new methods",
)
AT_UNIVERSITY = (
    "is choosing between two optional courses", "is looking for an internship",
    "is behind with the reading list", "is applying for a scholarship",
    "is sharing a flat for the first time", "is preparing for a semester abroad",
    "is tutoring two schoolchildren in the evenings", "is thinking of switching to another subject",
    "is living with grandparents to save rent", "has an essay due in nine days",
    "has a group project in which two people do nothing",
    "has to give a ten-minute talk in a seminar", "has to resit a failed exam in the autumn",
    "wants to take better notes in lectures", "wants to email a professor about a missed deadline",
)
AT_SCHOOL = (
    "is preparing a class talk about the oceans", "is nervous about an oral exam",
    "is torn between two very different careers", "is helping to organise a class trip",
    "is learning to cook simple meals", "is saving for a second-hand laptop",
    "is rehearsing for a play", "has a history project due on Friday",
    "has quarrelled with a close friend", "has been chosen as class representative",
    "has to write a letter of application for a summer job",
    "has trouble getting up in the morning", "wants to start a film club",
    "wants to convince the family to get a pet", "wants to study better with fewer late nights",
)
IN_RETIREMENT = (
    "wants to learn something entirely new", "is clearing out a cellar full of old tools",
    "is learning to make video calls to distant relatives", "is writing memoirs for the family",
    "is helping a young neighbour with mathematics homework",
    "is sorting forty years of photographs", "is thinking of volunteering two mornings a week",
    "is planning a first holiday alone", "has agreed to chair the residents' association",
    "wants to teach a class at the community centre",
)
IN_THE_HOUSEHOLD = (
    "is trying to bring more order into the week",
    "is wondering whether an online course is worth the money",
    "is planning simple meals for a whole month",
    "is preparing for an appointment at a public office",
    "is trying to keep one morning a week free", "has to fill in a long official form",
    "has to decide on a big household purchase", "feels out of touch with old friends",
    "wants to stretch the food budget", "wants to go back to studying part-time",
)
# fmt: on

EVERYWHERE = CITIES + TOWNS + PORTS
HOBBY_VERBS = ("enjoys", "has recently got into", "has long loved")

# Share of personas (of 100), occupations, places, experience, situations.
GROUPS = (
    (8, STAFF, EVERYWHERE, STAFF_NEW, LIFE + WORK + AMONG_STAFF + AS_NEW_STAFF),
    (17, STAFF, EVERYWHERE, SEASONED, LIFE + WORK + AMONG_STAFF + AS_SEASONED + AS_SEASONED_STAFF),
    (4, SPECIALISTS, CITIES, STAFF_NEW, LIFE + WORK + AMONG_STAFF + AS_NEW_STAFF),
    (9, SPECIALISTS, CITIES, SEASONED, LIFE + WORK + AMONG_STAFF + AS_SEASONED + AS_SEASONED_STAFF),
    (5, OWNERS, EVERYWHERE, OWNER_NEW, LIFE + WORK + AS_NEW_OWNER),
    (12, OWNERS, EVERYWHERE, SEASONED, LIFE + WORK + AS_SEASONED + AS_SEASONED_OWNER),
    (2, LAND, COUNTRYSIDE, OUTDOOR_NEW, LIFE + WORK + OUTDOORS),
    (5, LAND, COUNTRYSIDE, SEASONED, LIFE + WORK + AS_SEASONED + OUTDOORS),
    (2, SEA, PORTS, OUTDOOR_NEW, LIFE + WORK + OUTDOORS),
    (4, SEA, PORTS, SEASONED, LIFE + WORK + AS_SEASONED + OUTDOORS),
    (14, STUDENTS, CITIES, STUDIES, LIFE + AT_UNIVERSITY),
    (4, PUPILS, EVERYWHERE, SCHOOLING, AT_SCHOOL),
    (7, RETIRED, EVERYWHERE + COUNTRYSIDE, AFTER_WORK, LIFE + IN_RETIREMENT),
    (7, HOME, EVERYWHERE + COUNTRYSIDE, AT_HOME, LIFE + IN_THE_HOUSEHOLD),
)
_DRAWN = tuple(group for group in GROUPS for _ in range(group[0]))


def persona(seed: int, index: int) -> str:
    """Return built-in persona `index`, one or two English sentences in the third person.

    It depends on the two numbers alone: choices are the digits of one SHA-256, in mixed base, so
    they are the same on every platform and in every version of Python.
    """
    number = int.from_bytes(hashlib.sha256(f"{seed}:{index}:persona".encode()).digest(), "big")

    def pick(options: tuple) -> Any:
        nonlocal number
        number, at = divmod(number, len(options))
        return options[at]

    _, occupations, places, levels, situations = pick(_DRAWN)
    who = f"{pick(occupations)} {pick(places)} {pick(levels)} who {pick(HOBBY_VERBS)}"
    interest, situation, tone = pick(INTERESTS), pick(situations), pick(TONES)
    if pick((True, False)):
        return f"{who} {interest} and {situation}. {_capital(tone)}."
    return f"{who} {interest}. {_capital(situation)}; {tone}."


def builtin(seed: int, count: int) -> list[str]:
    """Return the built-in personas 0 to `count` - 1 of `seed`."""
    return [persona(seed, index) for index in range(count)]


def distinct() -> int:
    """Return how many different personas the built-in sampler can make."""
    people = sum(
        len(occupations) * len(places) * len(levels) * len(situations)
        for _, occupations, places, levels, situations in GROUPS
    )
    return people * len(HOBBY_VERBS) * len(INTERESTS) * len(TONES) * 2


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
