//! SHA-256 of messages of one length, several at a time.
//!
//! Each round of SHA-256 waits for the one before, so a processor with SHA instructions pauses
//! between them. The rounds of other messages fill the pauses. Vectors do the rounds of as many
//! messages at once as they have words.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod sha_ni;
#[cfg(target_arch = "x86_64")]
mod vectors;

use std::sync::OnceLock;

/// Bytes that SHA-256 takes in at a time.
pub const BLOCK: usize = 64;

/// The round constants: FIPS 180-4, 4.2.2.
#[rustfmt::skip]
const K: [u32; 64] = [
    0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5, 0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5,
    0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3, 0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174,
    0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc, 0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da,
    0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7, 0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967,
    0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13, 0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85,
    0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3, 0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070,
    0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5, 0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3,
    0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208, 0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2,
];

/// The initial state: FIPS 180-4, 5.3.3.
pub const INITIAL: [u32; 8] = [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// The states of `N` messages: word by word, of each message.
type States<const N: usize> = [[u32; N]; 8];

/// Instructions to hash with. All of them give the same digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Isa);

/// Only [`Kernel::available`] makes a [`Kernel`], but for [`Kernel::ONE`]: so each of them can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Isa {
    /// Sixteen messages in the lanes of AVX-512.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Four messages, with the SHA instructions of x86-64.
    #[cfg(target_arch = "x86_64")]
    ShaNi,
    /// Eight messages in the lanes of AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Four messages, with the SHA instructions of ARMv8.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// One message at a time: the crate `sha2`.
    One,
}

impl Kernel {
    /// All that this machine has, the fastest for many messages first. The last one is
    /// [`Self::ONE`].
    #[must_use]
    pub fn available() -> &'static [Self] {
        static AVAILABLE: OnceLock<Vec<Kernel>> = OnceLock::new();
        AVAILABLE.get_or_init(|| detect().map(Self).collect())
    }

    /// One message after the other, with the crate `sha2`: the reference.
    pub const ONE: Self = Self(Isa::One);

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Isa::ShaNi => "SHA-NI",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "AVX2",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "ARMv8",
            Isa::One => "one",
        }
    }

    /// Messages that it hashes at a time.
    #[must_use]
    pub const fn lanes(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => 16,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => 8,
            #[cfg(target_arch = "x86_64")]
            Isa::ShaNi => 4,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => 4,
            Isa::One => 1,
        }
    }

    /// The fewest messages for which the kernels after it are not faster. Lanes of vectors take as
    /// long without a message as with one.
    const fn worth(self) -> usize {
        match self.lanes() {
            16 => 9,
            8 => 3,
            4 => 2,
            _ => 1,
        }
    }

    /// Takes whole blocks of messages into their states, as many messages at a time as there are
    /// lanes.
    fn blocks(self, states: &mut [[u32; 8]], parts: &[&[u8]]) {
        for (states, parts) in states.chunks_mut(self.lanes()).zip(parts.chunks(self.lanes())) {
            match self.0 {
                // SAFETY: `detect` found the instructions of each, and only what it found becomes
                // a `Kernel`.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => in_lanes(|states, parts| unsafe { vectors::avx512::blocks(states, parts) }, states, parts),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => in_lanes(|states, parts| unsafe { vectors::avx2::blocks(states, parts) }, states, parts),
                #[cfg(target_arch = "x86_64")]
                Isa::ShaNi => match states.len() {
                    2 => in_lanes::<2>(|states, parts| unsafe { sha_ni::blocks(states, parts) }, states, parts),
                    3 => in_lanes::<3>(|states, parts| unsafe { sha_ni::blocks(states, parts) }, states, parts),
                    _ => in_lanes::<4>(|states, parts| unsafe { sha_ni::blocks(states, parts) }, states, parts),
                },
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => match states.len() {
                    2 => in_lanes::<2>(|states, parts| unsafe { neon::blocks(states, parts) }, states, parts),
                    3 => in_lanes::<3>(|states, parts| unsafe { neon::blocks(states, parts) }, states, parts),
                    _ => in_lanes::<4>(|states, parts| unsafe { neon::blocks(states, parts) }, states, parts),
                },
                Isa::One => one(&mut states[0], parts[0]),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> impl Iterator<Item = Isa> {
    let has_sha_ni = is_x86_feature_detected!("sha") && is_x86_feature_detected!("ssse3") && is_x86_feature_detected!("sse4.1");
    let has_avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
    let sha_ni = has_sha_ni.then_some(Isa::ShaNi);
    let avx512 = has_avx512.then_some(Isa::Avx512);
    let avx2 = is_x86_feature_detected!("avx2").then_some(Isa::Avx2);
    let in_order = if halves_vectors() { [sha_ni, avx512, avx2] } else { [avx512, sha_ni, avx2] };
    in_order.into_iter().flatten().chain([Isa::One])
}

/// Whether this is a processor of AMD before Zen 5: Zen 4 takes two steps for a vector of AVX-512,
/// earlier ones have none. Their SHA instructions take half the time of Intel's.
#[cfg(target_arch = "x86_64")]
fn halves_vectors() -> bool {
    use std::arch::x86_64::__cpuid;
    let (vendor, version) = (__cpuid(0), __cpuid(1).eax);
    let family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    name.as_flattened() == b"AuthenticAMD" && family < 0x1a
}

#[cfg(target_arch = "aarch64")]
fn detect() -> impl Iterator<Item = Isa> {
    let neon = std::arch::is_aarch64_feature_detected!("sha2").then_some(Isa::Neon);
    neon.into_iter().chain([Isa::One])
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> impl Iterator<Item = Isa> {
    std::iter::once(Isa::One)
}

/// Messages of one length that are best hashed together on this processor.
#[must_use]
pub fn lanes() -> usize {
    Kernel::available()[0].lanes()
}

/// Messages of one length that are hashed side by side.
#[derive(Clone, Debug)]
pub struct Hasher {
    /// Which kernel hashes how many of the messages that come next.
    plan: Vec<(Kernel, usize)>,
    states: Vec<[u32; 8]>,
    /// Bytes of each message so far.
    len: u64,
}

impl Hasher {
    /// So many messages, with the kernels that take the least time for as many.
    #[must_use]
    pub fn new(messages: usize) -> Self {
        let (mut plan, mut left) = (Vec::new(), messages);
        for kernel in Kernel::available() {
            // All full lanes, and the rest if it is worth it.
            let full = left - left % kernel.lanes();
            let now = if left - full >= kernel.worth() { left } else { full };
            if now > 0 {
                plan.push((*kernel, now));
            }
            left -= now;
        }
        Self { plan, states: vec![INITIAL; messages], len: 0 }
    }

    /// So many messages, with one of the kernels.
    #[must_use]
    pub fn with_kernel(kernel: Kernel, messages: usize) -> Self {
        Self { plan: vec![(kernel, messages)], states: vec![INITIAL; messages], len: 0 }
    }

    /// The next bytes of each message: equally many, and whole blocks of [`BLOCK`] bytes.
    ///
    /// # Panics
    /// If they are not, or if there are not as many as messages.
    pub fn update(&mut self, parts: &[&[u8]]) {
        let len = self.len_of(parts);
        assert!(len.is_multiple_of(BLOCK), "whole blocks");
        self.len += len as u64;
        let (mut states, mut parts) = (&mut self.states[..], parts);
        for (kernel, count) in &self.plan {
            let (these, others) = states.split_at_mut(*count);
            kernel.blocks(these, &parts[..*count]);
            (states, parts) = (others, &parts[*count..]);
        }
    }

    /// The last bytes of each message, equally many. Returns their digests, in their order.
    ///
    /// # Panics
    /// If they are not, or if there are not as many as messages.
    #[must_use]
    pub fn finish(mut self, ends: &[&[u8]]) -> Vec<[u8; 32]> {
        let whole = self.len_of(ends) / BLOCK * BLOCK;
        self.update(&ends.iter().map(|end| &end[..whole]).collect::<Vec<_>>());
        // The rest, a bit, zeros, and the number of bits: one block or two.
        let rests = ends.iter().map(|end| &end[whole..]);
        let padded: Vec<[u8; 2 * BLOCK]> = rests.map(|rest| pad(rest, self.len)).collect();
        let used = padded_len(ends.first().map_or(0, |end| end.len() - whole));
        self.update(&padded.iter().map(|padded| &padded[..used]).collect::<Vec<_>>());
        let digest = |state: &[u32; 8]| {
            let mut digest = [0; 32];
            digest.as_chunks_mut::<4>().0.iter_mut().zip(state).for_each(|(four, word)| *four = word.to_be_bytes());
            digest
        };
        self.states.iter().map(digest).collect()
    }

    /// The length that all of `parts` have.
    fn len_of(&self, parts: &[&[u8]]) -> usize {
        assert_eq!(parts.len(), self.states.len(), "a part of each message");
        let len = parts.first().map_or(0, |part| part.len());
        assert!(parts.iter().all(|part| part.len() == len), "parts of one length");
        len
    }
}

/// SHA-256 of each of `messages`.
///
/// # Panics
/// If they are not of one length.
#[must_use]
pub fn of_each(messages: &[&[u8]]) -> Vec<[u8; 32]> {
    Hasher::new(messages.len()).finish(messages)
}

/// Bytes of the blocks in which a message of so many bytes more than whole blocks ends.
const fn padded_len(rest: usize) -> usize {
    if rest < BLOCK - 8 { BLOCK } else { 2 * BLOCK }
}

/// The end of a message: `rest`, before which `whole` bytes came.
fn pad(rest: &[u8], whole: u64) -> [u8; 2 * BLOCK] {
    let (mut padded, used) = ([0; 2 * BLOCK], padded_len(rest.len()));
    padded[..rest.len()].copy_from_slice(rest);
    padded[rest.len()] = 0x80;
    padded[used - 8..used].copy_from_slice(&(8 * (whole + rest.len() as u64)).to_be_bytes());
    padded
}

/// Takes whole blocks of one message into its state.
fn one(state: &mut [u32; 8], part: &[u8]) {
    sha2::block_api::compress256(state, part.as_chunks().0);
}

/// Gives a kernel up to `N` messages. Lanes without a message work on the last one again.
fn in_lanes<const N: usize>(blocks: impl Fn(&mut States<N>, &[&[u8]; N]), states: &mut [[u32; 8]], parts: &[&[u8]]) {
    let of = |lane: usize| lane.min(parts.len() - 1);
    let mut words: States<N> = std::array::from_fn(|word| std::array::from_fn(|lane| states[of(lane)][word]));
    blocks(&mut words, &std::array::from_fn(|lane| parts[of(lane)]));
    for (lane, state) in states.iter_mut().enumerate() {
        *state = words.map(|word| word[lane]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of `len` bytes, each with other bytes.
    fn messages(count: usize, len: usize) -> Vec<Vec<u8>> {
        let byte = |message: usize, at: usize| (at.wrapping_mul(31).wrapping_add(message * 7) >> (message % 5)) as u8;
        (0..count).map(|message| (0..len).map(|at| byte(message, at)).collect()).collect()
    }

    fn with(kernel: Kernel, messages: &[Vec<u8>]) -> Vec<[u8; 32]> {
        Hasher::with_kernel(kernel, messages.len()).finish(&slices(messages))
    }

    fn slices(messages: &[Vec<u8>]) -> Vec<&[u8]> {
        messages.iter().map(Vec::as_slice).collect()
    }

    fn reference(messages: &[Vec<u8>]) -> Vec<[u8; 32]> {
        use sha2::Digest as _;
        messages.iter().map(|message| sha2::Sha256::digest(message).into()).collect()
    }

    #[test]
    fn every_kernel_gives_the_examples_of_fips_180_4() {
        let examples: [(&[u8], &str); 3] = [
            (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
        ];
        for (message, hex) in examples {
            for kernel in Kernel::available() {
                for count in 1..=kernel.lanes() {
                    for digest in with(*kernel, &vec![message.to_vec(); count]) {
                        let found: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
                        assert_eq!(found, hex, "{} of {count}", kernel.name());
                    }
                }
            }
        }
    }

    #[test]
    fn every_kernel_gives_the_digests_of_sha2_for_every_length_and_number_of_messages() {
        for len in (0..=300).chain([4096, 8191, 180_224]) {
            for count in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 15, 16, 17, 33] {
                let messages = messages(count, len);
                let expected = reference(&messages);
                assert_eq!(of_each(&slices(&messages)), expected, "{count} of {len} bytes");
                for kernel in Kernel::available() {
                    assert_eq!(with(*kernel, &messages), expected, "{}: {count} of {len} bytes", kernel.name());
                }
            }
        }
    }

    #[test]
    fn messages_anywhere_in_memory_are_hashed_alike() {
        let bytes = messages(1, 2000).remove(0);
        for kernel in Kernel::available() {
            let lanes = kernel.lanes();
            let at: Vec<Vec<u8>> = (0..lanes).map(|lane| bytes[17 * lane + 1..][..777].to_vec()).collect();
            let overlapping: Vec<&[u8]> = (0..lanes).map(|lane| &bytes[17 * lane + 1..][..777]).collect();
            let found = Hasher::with_kernel(*kernel, lanes).finish(&overlapping);
            assert_eq!(found, reference(&at), "{}", kernel.name());
        }
    }

    #[test]
    fn messages_in_pieces_are_hashed_alike() {
        for (count, len) in [(1, 1000), (3, 777), (16, 4096), (21, 5000)] {
            let messages = messages(count, len);
            for step in [64, 128, 640] {
                let (mut hasher, mut at) = (Hasher::new(count), 0);
                while at + step <= len {
                    hasher.update(&messages.iter().map(|message| &message[at..at + step]).collect::<Vec<_>>());
                    at += step;
                }
                let found = hasher.finish(&messages.iter().map(|message| &message[at..]).collect::<Vec<_>>());
                assert_eq!(found, reference(&messages), "{count} of {len} bytes by {step}");
            }
        }
    }

    #[test]
    fn each_message_has_a_kernel() {
        for count in 0..100 {
            let plan = Hasher::new(count).plan;
            assert_eq!(plan.iter().map(|(_, count)| count).sum::<usize>(), count, "{plan:?}");
        }
        // Few messages do not take the time of many.
        assert!(Hasher::new(2).plan.iter().all(|(kernel, _)| kernel.lanes() <= 4));
    }

    #[test]
    fn the_fastest_kernel_is_first_and_the_reference_last() {
        let available = Kernel::available();
        assert_eq!(available.last(), Some(&Kernel::ONE));
        assert_eq!(lanes(), available[0].lanes());
        // Under an emulator, whose processor may lack the instructions.
        if let Ok(expected) = std::env::var("PF_EXPECT_KERNEL") {
            assert_eq!(available[0].name(), expected);
        }
        assert!(available.iter().enumerate().all(|(at, kernel)| !available[..at].contains(kernel)), "{available:?}");
    }

    #[test]
    #[should_panic(expected = "parts of one length")]
    fn messages_of_other_lengths_are_refused() {
        let _ = of_each(&[b"one", b"four"]);
    }

    #[test]
    #[should_panic(expected = "a part of each message")]
    fn a_part_too_few_is_refused() {
        Hasher::new(2).update(&[&[0; 64]]);
    }

    #[test]
    #[should_panic(expected = "whole blocks")]
    fn part_of_a_block_is_refused() {
        Hasher::new(1).update(&[&[0; 63]]);
    }
}
