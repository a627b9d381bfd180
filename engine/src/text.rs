//! Text for KV caches: some prose written for this project, and what the model makes of it.
//!
//! A cache of one sentence over and over would compress far better than real ones do, so the
//! default text begins with prose and goes on as a conversation about many subjects, the model's
//! answers drawn with a seed.

use crate::error::EngineError;
use crate::rng::Rng;
use crate::sample::Sampler;
use crate::{Engine, SeqId};

/// Tokens of one sequence at most; longer corpora are several sequences.
pub const SEQUENCE_TOKENS: usize = 2048;
/// Tokens of one answer at most.
const ANSWER_TOKENS: usize = 240;

/// About 300 words of prose, written for this project.
pub const PROSE: &str = "\
The lighthouse keeper had stopped counting the ships years ago. They came from the south in spring, low in the \
water with timber and salt, and went back in autumn with whatever the valley had to sell: wool, honey, a few \
crates of the bitter apples that nobody in the village would eat. What she counted now were the nights on which \
the lamp had needed her. Most nights it did not. The clockwork turned, the oil rose in its wick, and the beam \
went round over the black water like a slow thought.

On the evening of the second storm a boy of about twelve climbed the path with a letter inside his coat. He said \
that the harbour master wanted to know how many hours of oil were left, and whether the northern light had been \
seen. She gave him soup before she gave him an answer. Nineteen hours, she wrote, and no, not since Tuesday. The \
boy watched the great lens while he ate. He asked why the glass was cut into rings when a single smooth piece \
would be so much easier to clean.

\"Because a single piece would be as thick as this wall,\" she said, \"and all the light would tire itself out on \
the way through. Each ring bends only its own share. Together they do what one could not.\" He thought about \
this for some time. Then he asked whether somebody could take one ring out, repair it, and put it back without \
anyone at sea noticing.

She laughed, because it was exactly what she had done in March. You number the rings, she told him, and you write \
the numbers down in a book, with the day and the reason. If the book is right, you can build the whole lens again \
in the dark. If the book is wrong, you have a cellar full of expensive glass.
";

const QUESTIONS: [&str; 16] = [
    "How does a sailing boat move against the wind?",
    "Write a short story about two clockmakers who share one workshop.",
    "Explain to a child why bread rises.",
    "What should I look at before I buy an old bicycle?",
    "Describe the life of a river from its spring to the sea.",
    "Give me a plan for a small vegetable garden.",
    "Why do languages change over time?",
    "How would you teach someone to play chess?",
    "What happens inside a computer when a program is started?",
    "Write a letter from a scientist on an island to her brother.",
    "Which are the differences between a moth and a butterfly?",
    "How was paper made before there were machines?",
    "Tell me about the planets that are farther away than Mars.",
    "What makes a good team of people who build bridges?",
    "Write a Python function that counts words, and explain it.",
    "How do I cook a soup for ten people?",
];

/// Makes sequences of `tokens` tokens together, each of at most [`SEQUENCE_TOKENS`], from `text`
/// (the whole of it, if it is long enough) or from [`PROSE`] and conversations. The same arguments
/// give the same tokens.
///
/// # Errors
/// [`EngineError::Tokenize`] if `text` has a byte without token, [`EngineError::PoolFull`].
pub fn corpus(engine: &mut Engine, text: Option<&str>, tokens: usize, seed: u64) -> Result<Vec<SeqId>, EngineError> {
    let given = engine.tokenize(text.unwrap_or(PROSE))?;
    let mut given = given.as_slice();
    let mut rng = Rng::new(seed);
    let mut sequences = Vec::new();
    let mut missing = tokens;
    while missing > 0 {
        let size = missing.min(SEQUENCE_TOKENS);
        let seq = engine.create();
        let (now, later) = given.split_at(given.len().min(size));
        engine.prefill(seq, now)?;
        given = later;
        converse(engine, seq, size, &mut rng)?;
        sequences.push(seq);
        missing -= size;
    }
    Ok(sequences)
}

/// Lets the model answer questions until the sequence has `size` tokens.
fn converse(engine: &mut Engine, seq: SeqId, size: usize, rng: &mut Rng) -> Result<(), EngineError> {
    let mut order: Vec<usize> = (0..QUESTIONS.len()).collect();
    rng.shuffle(&mut order);
    let eos = engine.tokenizer().eos();
    let mut sampler = Sampler::varied(rng.next());
    for question in order.iter().cycle() {
        let room = |engine: &Engine| Ok::<_, EngineError>(size - engine.tokens(seq)?.len());
        let ended = engine.tokens(seq)?.last() == Some(&eos);
        let end = if ended { "" } else { "<|im_end|>" };
        let turn = format!("{end}\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", QUESTIONS[*question]);
        let turn = engine.tokenize(&turn)?;
        engine.prefill(seq, &turn[..turn.len().min(room(engine)?)])?;
        let answer = room(engine)?.min(ANSWER_TOKENS);
        engine.generate_with(seq, answer, &mut sampler, |token| token != eos)?;
        if room(engine)? == 0 {
            break;
        }
    }
    Ok(())
}
