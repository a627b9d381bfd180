use crate::common::cases;
use pfr_schema::ranges::Ranges;
use proptest::prelude::*;

fn ranges(json: &str) -> Ranges {
    serde_json::from_str(json).unwrap()
}

#[test]
fn indices_become_ranges_where_each_is_its_predecessor_plus_one() {
    let table: [(&[u32], &str); 7] = [
        (&[], "[]"),
        (&[0], "[[0,1]]"),
        (&[0, 1, 2], "[[0,3]]"),
        (&[2, 1, 0], "[[2,1],[1,1],[0,1]]"),
        (&[5, 5, 5], "[[5,1],[5,1],[5,1]]"),
        (&[7, 8, 3, 4, 5, 9], "[[7,2],[3,3],[9,1]]"),
        (&[u32::MAX - 1, u32::MAX, 0], "[[4294967294,2],[0,1]]"),
    ];
    for (indices, json) in table {
        let list: Ranges = indices.iter().copied().collect();
        assert_eq!(serde_json::to_string(&list).unwrap(), json);
        assert_eq!(list.iter().collect::<Vec<_>>(), indices);
    }
}

#[test]
fn the_length_of_a_lying_list_is_counted_without_walking_it() {
    let list = ranges(&format!("[{}[0,4294967295]]", "[0,4294967295],".repeat(999)));
    assert_eq!(list.len(), 1000 * u64::from(u32::MAX));
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn any_list_survives_as_ranges(list in prop::collection::vec(prop_oneof![any::<u32>(), 0_u32..20, Just(u32::MAX)], 0..200)) {
        let packed: Ranges = list.iter().copied().collect();
        prop_assert_eq!(packed.len(), list.len() as u64);
        prop_assert_eq!(packed.is_empty(), list.is_empty());
        prop_assert_eq!(packed.iter().collect::<Vec<_>>(), list);
        let text = serde_json::to_string(&packed).unwrap();
        prop_assert_eq!(ranges(&text), packed);
    }
}
