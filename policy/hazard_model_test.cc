// SPDX-License-Identifier: Apache-2.0
#include "policy/hazard_model.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvtier::policy {
namespace {

constexpr ClassIdx kFresh = 0;  // unknown next step, used once, no gap

TEST(HazardModelTest, BucketsAreHalfOctaves) {
  EXPECT_EQ(AgeBucket(0), 0U);
  EXPECT_EQ(AgeBucket(15), 0U);
  EXPECT_EQ(AgeBucket(16), 1U);
  EXPECT_EQ(AgeBucket(22), 1U);
  EXPECT_EQ(AgeBucket(23), 2U);
  EXPECT_EQ(AgeBucket(32), 3U);
  EXPECT_EQ(AgeBucket(UINT32_MAX), kAgeBucketCount - 1);
  for (Tick age = 1; age < 1U << 20; ++age) ASSERT_GE(AgeBucket(age), AgeBucket(age - 1)) << age;
}

TEST(HazardModelTest, ClassesAreDistinct) {
  EXPECT_EQ(ClassOf(NextStep::kUnknown, 1, 0), kFresh);
  EXPECT_EQ(ClassOf(NextStep::kUnknown, 3, 5), ClassOf(NextStep::kUnknown, 7, 5));
  EXPECT_NE(ClassOf(NextStep::kUnknown, 7, 5), ClassOf(NextStep::kUnknown, 8, 5));
  EXPECT_NE(ClassOf(NextStep::kTool, 1, 0), ClassOf(NextStep::kUser, 1, 0));
  EXPECT_LT(ClassOf(NextStep::kFinished, 255, kGapClassCount - 1), kClassCount);
  EXPECT_EQ(GapClass(0), 1);
  EXPECT_EQ(GapClass(16), 2);
  EXPECT_EQ(GapClass(UINT32_MAX), kGapClassCount - 1);
}

TEST(HazardModelTest, UntaughtWorthFallsWithAge) {
  const HazardModel model({});
  for (Tick age = 1; age < 1U << 22; age += 1 + age / 64) {
    ASSERT_LT(model.Worth(kFresh, age), model.Worth(kFresh, age - 1)) << "age " << age;
  }
}

TEST(HazardModelTest, UntaughtClassesAreWorthTheSameButFinishedOnes) {
  const HazardModel model({});
  const float fresh = model.Worth(kFresh, 100);
  EXPECT_FLOAT_EQ(model.Worth(ClassOf(NextStep::kUser, 9, 7), 100), fresh);
  EXPECT_LT(model.Worth(ClassOf(NextStep::kFinished, 9, 7), 100), fresh);
}

// Blocks of one class come back after ten seconds, those of another never.
class TaughtModelTest : public testing::Test {
 protected:
  static constexpr Tick kSecond = 1000 / kTickMs;

  void Teach(HazardModel* model, int round_count) {
    std::vector<CohortIdx> cohorts;
    for (int round = 0; round < round_count; ++round) {
      const Tick now = 1 + static_cast<Tick>(round) * kSecond;
      for (int i = 0; i < 50; ++i) model->Enter(dead_, now);
      cohorts.push_back(model->Enter(alive_, now));
      if (round >= 10) {
        const Tick entered = now - 10 * kSecond;
        model->Reuse(alive_, cohorts[static_cast<size_t>(round) - 10], entered, now);
      }
    }
    model->Refresh();
  }

  const ClassIdx alive_ = ClassOf(NextStep::kTool, 9, 8);
  const ClassIdx dead_ = ClassOf(NextStep::kTool, 1, 0);
};

TEST_F(TaughtModelTest, LearnsWhichClassComesBack) {
  HazardModel model({});
  Teach(&model, 2000);
  EXPECT_GT(model.Worth(alive_, 0), 20 * model.Worth(dead_, 0));
  // Closer to its return a block is worth more, although it is older.
  EXPECT_GT(model.Worth(alive_, 8 * kSecond), 2 * model.Worth(alive_, 1));
  // Well after the time at which all of them came it is worth little.
  EXPECT_LT(model.Worth(alive_, 100 * kSecond), model.Worth(alive_, 8 * kSecond) / 5);
}

TEST_F(TaughtModelTest, ForgetsWhatWasLongAgo) {
  HazardModel model({.halving_reuse_count = 200});
  Teach(&model, 2000);
  const float before = model.Worth(alive_, 8 * kSecond);
  // Now the class stops coming back.
  Tick now = 3000 * kSecond;
  for (int round = 0; round < 4000; ++round, now += kSecond) model.Enter(alive_, now);
  model.Advance(now + 1000 * kSecond);
  model.Refresh();
  EXPECT_LT(model.Worth(alive_, 8 * kSecond), before / 5);
}

TEST_F(TaughtModelTest, RestoresWhatItSaved) {
  HazardModel model({});
  Teach(&model, 500);
  const std::string saved = model.Save();
  HazardModel other({});
  ASSERT_TRUE(other.Restore(saved).ok());
  EXPECT_EQ(other.Save(), saved);
  HazardModel again({});
  ASSERT_TRUE(again.Restore(saved).ok());
  for (const Tick age : {0U, 100U, 5000U}) {
    EXPECT_EQ(other.Worth(alive_, age), again.Worth(alive_, age));
    EXPECT_NEAR(other.Worth(alive_, age), model.Worth(alive_, age), 0.1F);
  }
}

TEST_F(TaughtModelTest, RefusesDamagedBytesAndStaysAsItWas) {
  HazardModel model({});
  Teach(&model, 500);
  const std::string saved = model.Save();
  HazardModel other({});
  const std::string untaught = other.Save();
  EXPECT_FALSE(other.Restore("").ok());
  EXPECT_FALSE(other.Restore(saved.substr(0, saved.size() - 1)).ok());
  for (size_t at = 0; at < saved.size(); at += 7) {
    std::string damaged = saved;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    ASSERT_FALSE(other.Restore(damaged).ok()) << "byte " << at;
  }
  EXPECT_EQ(other.Save(), untaught);
}

TEST(HazardModelTest, StaysWithinItsCohorts) {
  HazardModel model({.cohort_count_max = 8});
  std::vector<CohortIdx> cohorts;
  for (Tick now = 1; now < 100; ++now) {
    cohorts.push_back(model.Enter(kFresh, now));
    ASSERT_LT(cohorts.back(), 8U);
  }
  const std::string before = model.Save();
  // Its cohort was given to another block meanwhile: nothing is learned.
  model.Reuse(kFresh, cohorts[0], 1, 99);
  EXPECT_EQ(model.Save(), before);
  model.Reuse(kFresh, cohorts[97], 98, 99);
  EXPECT_NE(model.Save(), before);
}

}  // namespace
}  // namespace kvtier::policy
